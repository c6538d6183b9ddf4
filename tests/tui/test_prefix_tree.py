"""The prefix tree: runs of cached blocks, who shares them, how often they were found, and what they say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.events.sources.base import StreamItem
from aioengine.testing import in_virtual_time
from aioengine_tui.model.blocks import PrefixNode
from aioengine_tui.model.prefix_tree import PrefixRun, prefix_runs, run_texts
from aioengine_tui.screens.prefix import PrefixView
from tests.tui.runs import make_run
from tests.tui.support import HEADER, ListSource, MadeUpEngine, busy_items, folded
from tests.tui.test_app import press, running


def chain(first: int, hashes: str, *, parent: str = "", hits: int = 0) -> list[PrefixNode]:
    nodes = []
    for offset, name in enumerate(hashes):
        nodes.append(PrefixNode(first + offset, name, parent, hits, 0))
        parent = name
    return nodes


def shape(runs: list[PrefixRun]) -> list[tuple[int, str, int]]:
    return [(run.depth, "".join(node.block_hash for node in run.nodes), run.num_hits) for run in runs]


def test_a_chain_is_one_row_until_it_branches_or_its_hits_or_owners_change() -> None:
    owners = {1: ("a", "b"), 2: ("a", "b"), 3: ("a",), 4: ("b",)}
    nodes = [*chain(1, "xy", hits=1), *chain(3, "p", parent="y"), *chain(4, "qr", parent="y"), *chain(6, "z")]
    runs = prefix_runs(nodes, lambda block_id: owners.get(block_id, ()))
    assert shape(runs) == [(0, "xy", 1), (1, "p", 0), (1, "q", 0), (2, "r", 0), (0, "z", 0)]
    assert [run.owners for run in runs] == [("a", "b"), ("a",), ("b",), (), ()]
    assert [run.num_blocks_before for run in runs] == [0, 2, 2, 3, 0]
    assert [run.is_last for run in runs] == [False, False, True, True, True]


def test_a_run_whose_beginning_was_evicted_is_shown_as_cut_off() -> None:
    runs = prefix_runs([*chain(5, "cd", parent="gone"), *chain(1, "a")], lambda _: ())
    assert [(shape([run])[0][1], run.is_detached) for run in runs] == [("a", False), ("cd", True)]


def test_a_prefix_deeper_than_python_recurses() -> None:
    nodes = [PrefixNode(i + 1, str(i), str(i - 1) if i else "", i % 2, 0) for i in range(5000)]
    runs = prefix_runs(nodes, lambda _: ())
    assert len(runs) == 5000
    assert runs[-1].depth == 4999


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=40))
def test_every_cached_block_is_in_one_run_below_its_parent(spec: list[tuple[int, int]]) -> None:
    nodes = [PrefixNode(i + 1, f"h{i}", f"h{parent}" if parent < i else "", hits, 0) for i, (parent, hits) in enumerate(spec)]
    runs = prefix_runs(nodes, lambda block_id: ("a",) if block_id % 3 else ())
    assert sorted(node.block_id for run in runs for node in run.nodes) == [node.block_id for node in nodes]
    path: list[PrefixRun] = []
    for run in runs:
        del path[run.depth :]
        assert len(path) == run.depth
        assert run.nodes[0].parent_hash == (path[-1].nodes[-1].block_hash if path else "")
        for before, after in zip(run.nodes, run.nodes[1:], strict=False):
            assert after.parent_hash == before.block_hash
        path.append(run)


def test_texts_are_what_all_requests_below_a_run_have_in_common() -> None:
    nodes = [*chain(1, "xy"), *chain(3, "p", parent="y"), *chain(4, "q", parent="y")]
    runs = prefix_runs(nodes, lambda _: ())
    texts = {"xy": [], "p": ["You are kind. Why?"], "q": ["You are kind. How so?"]}
    assert run_texts(runs, lambda run: texts["".join(node.block_hash for node in run.nodes)]) == ["You are kind. ", "Why?", "How so?"]


# ---------------------------------------------------------------------------------------------------- of a real engine
def test_hits_and_owners_of_a_shared_prefix_are_counted_from_a_real_scheduler() -> None:
    engine = MadeUpEngine()
    shared = list(range(1, 17))  # four blocks
    items: list[StreamItem] = [HEADER]
    for number in range(3):
        engine.add(f"r{number}", num_prompt_tokens=20, max_tokens=30, prompt=[*shared, *(100 + number * 10 + i for i in range(4))])
        items += engine.run(2)
    state = folded(items)
    runs = prefix_runs(state.blocks.prefix_nodes(), state.blocks.owners)
    assert (len(runs[0].nodes), runs[0].num_hits, runs[0].owners) == (4, 2, ("r0", "r1", "r2"))
    assert [(run.depth, run.num_hits, run.owners) for run in runs[1:]] == [(1, 0, (f"r{number}",)) for number in range(3)]


def test_the_tree_of_a_varied_run_holds_what_the_cache_holds() -> None:
    run = make_run(num_requests=12)
    items = [run.header, *run.events]
    state = folded(items)
    runs = prefix_runs(state.blocks.prefix_nodes(), state.blocks.owners)
    last = run.snapshots[-1]
    assert sorted(node.block_id for one in runs for node in one.nodes) == last.cached_block_ids
    texts = run_texts(runs, lambda one: [])
    assert texts == [""] * len(runs)


# ---------------------------------------------------------------------------------------------------- the screen
@in_virtual_time
async def test_the_tree_is_a_key_away_from_the_blocks() -> None:
    for size in ((160, 48), (80, 24), (60, 16), (40, 10)):
        async with running(ListSource(busy_items()), size=size) as (app, pilot):
            await press(app, pilot, "4", "T")
            assert isinstance(app.view, PrefixView)
            assert "5" in app.view.text.splitlines()[2]  # blocks that alpha and beta share
            before = app.view.text
            await press(app, pilot, "down")
            assert app.view.text == before or size[1] >= 9
            await press(app, pilot, "escape")
            assert app.view.id == "blocks"
