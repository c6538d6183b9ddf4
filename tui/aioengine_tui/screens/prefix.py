"""The prefix tree: which beginnings of prompts the KV cache holds, who shares them, and how often they were found."""

from __future__ import annotations

import textwrap
from typing import ClassVar

from aioengine_tui.model.prefix_tree import PrefixRun, prefix_runs, run_texts
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.base import ListView
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_line, number, rule

_COLUMN = 7
_MAX_LETTERS = 8


class PrefixView(ListView):
    screen_title: ClassVar[str] = "Prefix tree"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (("↑↓", "cursor"), ("esc", "back"), ("4", "KV blocks"), ("e", "export"))

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self._built_for: tuple[int, int] = (-1, -1)
        self._runs: list[PrefixRun] = []
        self._texts: list[str] = []

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        self._build(state)
        runs = self._runs
        num_cached = state.blocks.num_cached
        num_free = sum(len(run.nodes) for run in runs if not run.owners)
        title: Line = []
        for label, value in (("cached blocks", num_cached), ("of them free", num_free), ("runs", len(runs))):
            title += [Part(f"{label} ", "muted"), Part(f"{value}   ", "value")]
        title.append(Part("hits: since attach", "muted"))
        if not runs:
            why = "this recording does not tell which block follows which" if num_cached else "the prefix cache holds nothing yet"
            return [fit_line(title, width), [Part(why, "muted")]]
        tree_width = max(18, min(40, width // 3))
        numbers = "".join(f"{name:>{_COLUMN}}" for name in ("blocks", "tokens", "hits"))
        header = f"{fit('prefix', tree_width)}{numbers}  {fit('owners', _MAX_LETTERS + 2)} begins with"
        lines: list[Line] = [fit_line(title, width), [Part(fit(header, width), "header")]]
        self.list_row = len(lines)
        num_foot = 4 if height >= 14 else 2 if height >= 9 else 0
        visible = self.scroll_state.fit(len(runs), max(1, height - len(lines) - num_foot))
        lines += [self._row(index, state, tree_width, width) for index in visible]
        foot = self._foot(state, width)[:num_foot]
        lines += [[] for _ in range(height - len(lines) - num_foot)]
        return [*lines, *foot][:height]

    def _build(self, state: DashboardState) -> None:
        """Once for each state: thousands of blocks are too many for every key."""
        key = (id(state), state.num_events)
        if key == self._built_for:
            return
        self._built_for = key
        self._runs = prefix_runs(state.blocks.prefix_nodes(), state.blocks.owners)
        self._texts = run_texts(self._runs, lambda run: _texts_of(run, state))

    def _row(self, index: int, state: DashboardState, tree_width: int, width: int) -> Line:
        run, size = self._runs[index], state.block_size or 0
        branch = "".join("│ " if more else "  " for more in run.guides) + ("" if not run.depth else "└─" if run.is_last else "├─")
        name = f"{branch}{run.nodes[0].block_hash[:8]}" + (" (cut off)" if run.is_detached else "")
        under = index == self.scroll_state.cursor
        line: Line = [Part(fit(name, tree_width), "cursor" if under else "text" if run.owners else "block_free_cached")]
        line += [Part(number(len(run.nodes), _COLUMN), "value"), Part(number(len(run.nodes) * size, _COLUMN))]
        line += [Part(number(run.num_hits, _COLUMN), "good" if run.num_hits else "muted"), Part("  ")]
        line += self._letters(run)
        text = clean(repr(self._texts[index])) if self._texts[index] else ""
        return fit_line([*line, Part(f" {text}", "muted")], width)

    def _letters(self, run: PrefixRun) -> Line:
        room = _MAX_LETTERS + 2
        if not run.owners:
            return [Part(fit("free", room), "block_free_cached")]
        marks = [self.session.owner_marks.of(owner) for owner in run.owners[:_MAX_LETTERS]]
        line: Line = [Part(mark.letter, f"owner_{mark.colour}") for mark in marks]
        more = f"+{len(run.owners) - _MAX_LETTERS}" if len(run.owners) > _MAX_LETTERS else ""
        return [*line, Part(fit(more, room - len(marks)), "muted")]

    def _foot(self, state: DashboardState, width: int) -> list[Line]:
        index = self.scroll_state.cursor
        run, size = self._runs[index], state.block_size or 0
        start = run.num_blocks_before * size
        blocks = " ".join(str(node.block_id) for node in run.nodes)
        where = (
            f"tokens {start} to {start + len(run.nodes) * size - 1} of the prefix" if not run.is_detached else "its beginning was evicted"
        )
        owners = ", ".join(map(clean, run.owners)) or "nobody: free, and still findable"
        lines: list[Line] = [
            rule(f"run {run.nodes[0].block_hash}", width, where),
            [Part("blocks ", "muted"), Part(blocks, "block_used"), Part("   owners ", "muted"), Part(owners, "value")],
        ]
        text = self._texts[index]
        wrapped = (
            textwrap.wrap(clean(repr(text)), max(10, width - 6)) if text else ["not known: the engine publishes no texts, or they are gone"]
        )
        lines += [[Part("text " if i == 0 else "     ", "muted"), Part(part)] for i, part in enumerate(wrapped[:2])]
        return [fit_line(line, width) for line in lines]

    def export_table(self, state: DashboardState) -> ExportTable:
        self._build(state)
        columns = ["depth", "block_hash", "parent_hash", "block_ids", "num_hits", "owners", "text"]
        return ExportTable(
            columns,
            [
                [
                    run.depth, run.nodes[0].block_hash, run.nodes[0].parent_hash, " ".join(str(node.block_id) for node in run.nodes),
                    run.num_hits, " ".join(run.owners), text,
                ]
                for run, text in zip(self._runs, self._texts, strict=True)
            ],
        )  # fmt: skip


def _texts_of(run: PrefixRun, state: DashboardState) -> list[str]:
    """The texts of requests that have these blocks, or had them last."""
    last = state.blocks.last_owner(run.nodes[-1].block_id)
    rows = [state.row(request_id) for request_id in dict.fromkeys((*run.owners, *([last] if last is not None else [])))]
    return [row.prompt + (row.text or "") for row in rows if row is not None and row.prompt]
