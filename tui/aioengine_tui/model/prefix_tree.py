"""The prefixes that the KV cache holds, as a tree: a node is a run of cached blocks, its children go on from it in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from aioengine_tui.model.blocks import PrefixNode


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Blocks that follow each other with the same owners and hits, and no branch between them: one row of the tree."""

    depth: int  # runs above it
    is_last: bool  # of the children of its parent
    guides: tuple[bool, ...]  # for each run above it but the first: whether further children of that one come below
    nodes: tuple[PrefixNode, ...]
    num_blocks_before: int  # of the prefix that it goes on from
    owners: tuple[str, ...]  # request ids; empty: free, and still findable
    is_detached: bool  # its parent is not cached any more: nobody can reach it until the parent is computed anew
    num_children: int

    @property
    def num_hits(self) -> int:
        return self.nodes[0].num_hits


def prefix_runs(nodes: Iterable[PrefixNode], owners: Callable[[int], tuple[str, ...]]) -> list[PrefixRun]:
    """The rows of the tree from top to bottom. Of siblings the one with most hits comes first, then the older block."""
    nodes = list(nodes)
    known = {node.block_hash for node in nodes}
    children: dict[str, list[PrefixNode]] = {}
    for node in sorted(nodes, key=lambda node: (-node.num_hits, node.block_id)):
        children.setdefault(node.parent_hash if node.parent_hash in known else "", []).append(node)
    runs: list[PrefixRun] = []
    roots = children.get("", [])
    # (first node, depth, is last, guides, blocks before); a stack, because a prefix may be deeper than Python recurses.
    stack: list[tuple[PrefixNode, int, bool, tuple[bool, ...], int]]
    stack = []
    stack += [(node, 0, index == len(roots) - 1, (), 0) for index, node in enumerate(roots)][::-1]
    while stack:
        first, depth, is_last, guides, num_before = stack.pop()
        run, below = _run_from(first, children, owners)
        runs.append(
            PrefixRun(depth, is_last, guides, run, num_before, owners(first.block_id), bool(first.parent_hash) and depth == 0, len(below))
        )
        inner = (*guides, not is_last) if depth else ()
        stack += [(node, depth + 1, index == len(below) - 1, inner, num_before + len(run)) for index, node in enumerate(below)][::-1]
    return runs


def _run_from(
    first: PrefixNode, children: Mapping[str, list[PrefixNode]], owners: Callable[[int], tuple[str, ...]]
) -> tuple[tuple[PrefixNode, ...], list[PrefixNode]]:
    """The nodes from `first` on that make one run, and what comes below them."""
    run, held = [first], owners(first.block_id)
    while True:
        below = children.get(run[-1].block_hash, [])
        if len(below) != 1 or below[0].num_hits != first.num_hits or owners(below[0].block_id) != held:
            return tuple(run), below
        run.append(below[0])


def run_texts(runs: list[PrefixRun], texts_of: Callable[[PrefixRun], Iterable[str]]) -> list[str]:
    """For each run the text that begins in it, as far as it is known; "" where it is not.

    texts_of: the whole texts of requests whose tokens a run holds. What all texts of a run and of the runs below it have in
    common lies in it or above it. Right to a token: a text says nothing of where its tokens end.
    """
    through: list[list[str]] = [list(texts_of(run)) for run in runs]
    parents = _parents(runs)
    for index in range(len(runs) - 1, -1, -1):
        if (parent := parents[index]) is not None:
            through[parent] += through[index]
    common = [_common_start(texts) for texts in through]
    texts = []
    for index, parent in enumerate(parents):
        above = common[parent] if parent is not None else ""
        texts.append(common[index][len(above) :] if common[index].startswith(above) else "")
    return texts


def _parents(runs: list[PrefixRun]) -> list[int | None]:
    """The index of each run's parent."""
    parents: list[int | None] = []
    path: list[int] = []
    for index, run in enumerate(runs):
        del path[run.depth :]
        parents.append(path[-1] if path else None)
        path.append(index)
    return parents


def _common_start(texts: list[str]) -> str:
    """The characters with which all of them begin."""
    if not texts:
        return ""
    first, last = min(texts), max(texts)  # whatever lies between them begins as both do
    length = next((index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
