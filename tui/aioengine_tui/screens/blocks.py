"""Screen 4: the KV cache, every block a cell."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenRequest
from aioengine_tui.model.state import DashboardState, RequestRow
from aioengine_tui.screens.base import View
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.block_grid import GridLayout, grid_lines, legend
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_line, fit_middle, number, percent, side_by_side

_RECENT_STEPS = 2
_LIST_WIDTH = 32
_WIDE = 110


class BlocksView(View):
    screen_title: ClassVar[str] = "KV blocks"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("←↑↓→", "cursor"), ("n", "light next"), ("N", "previous"), ("c", "none"), ("enter", "owner"),
    )  # fmt: skip

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "left", show=False),
        Binding("right,l", "move(1, 0)", "right", show=False),
        Binding("up,k", "move(0, -1)", "up", show=False),
        Binding("down,j", "move(0, 1)", "down", show=False),
        Binding("home", "move(-1000000, 0)", "first", show=False),
        Binding("end", "move(1000000, 0)", "last", show=False),
        Binding("n", "light(1)", "light the next request", show=False),
        Binding("N", "light(-1)", "light the previous request", show=False),
        Binding("c,escape", "unlight", "light no request", show=False),
        Binding("enter", "open", "the owner's page", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.cursor = 1  # a block id
        self.lights = True  # the blocks of the selected request
        self._layout = GridLayout.of(0, width=1, rows=1)
        self._grid_row = 0

    # ------------------------------------------------------------------ keys
    def action_move(self, columns: int, rows: int) -> None:
        step = columns + rows * self._layout.columns
        cell = max(0, min(self._layout.cell_of(self.cursor) + step, self._layout.num_cells - 1))
        self.cursor = self._layout.blocks_of(cell).start
        self.draw()

    def action_light(self, step: int) -> None:
        holders = [row.request_id for row in self.session.state.requests.values() if row.block_ids]
        if holders:
            known = self.lights and self.session.selected in holders
            index = (holders.index(self.session.selected or "") + step) % len(holders) if known else 0
            self.session.selected, self.lights = holders[index], True
        self.draw()

    def action_unlight(self) -> None:
        self.lights = False
        self.draw()

    def action_open(self) -> None:
        owners = self.session.state.blocks.owners(self.cursor)
        if owners:
            self.post_message(OpenRequest(owners[0]))

    def on_click(self, event: events.Click) -> None:
        cell = self._layout.cell_at(event.x, event.y - self._grid_row)
        if cell is not None:
            self.cursor = self._layout.blocks_of(cell).start
            self.draw()

    # ------------------------------------------------------------------ drawing
    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        if not state.blocks.num_blocks:
            return [[Part("the number of blocks is not known yet", "muted")]]
        grid_width = width - _LIST_WIDTH - 1 if width >= _WIDE else width
        head = [self._counts(state, width)]
        foot = self._cursor_lines(state, width)
        self._layout = layout = GridLayout.of(state.blocks.num_blocks, width=grid_width, rows=max(1, height - 2 - len(foot)))
        self.cursor = max(1, min(self.cursor, layout.num_blocks))
        head.append(fit_line(legend(layout.per_cell), width))
        self._grid_row = len(head)
        row = self._lit_row(state)
        codes = state.block_codes(recent_steps=_RECENT_STEPS)
        grid = grid_lines(codes, layout, lit=row.block_ids if row is not None else (), cursor=self.cursor)
        rows = height - len(head) - len(foot)
        grid = (grid + [[] for _ in range(rows)])[:rows]
        if grid_width < width:
            grid = side_by_side([grid, self._holders(state, rows)], [grid_width, _LIST_WIDTH])
        return [*head, *grid, *foot][:height]

    def _lit_row(self, state: DashboardState) -> RequestRow | None:
        return state.row(self.session.selected) if self.lights and self.session.selected is not None else None

    def _counts(self, state: DashboardState, width: int) -> Line:
        blocks = state.blocks
        line: Line = []
        usage = blocks.num_used / blocks.num_blocks
        counts = (
            ("used", f"{blocks.num_used}/{blocks.num_blocks} ({percent(usage)})"), ("shared", blocks.num_shared),
            ("cached", blocks.num_free_cached), ("free", blocks.num_free - blocks.num_free_cached),
            ("evicted", state.totals.num_evicted_blocks),
        )  # fmt: skip
        for label, value in counts:
            line += [Part(f"{label} ", "muted"), Part(f"{value}  ", "value")]
        return fit_line(line, width)

    def _cursor_lines(self, state: DashboardState, width: int) -> list[Line]:
        self.cursor = max(1, min(self.cursor, state.blocks.num_blocks))
        info = state.block(self.cursor, recent_steps=_RECENT_STEPS)
        span = self._layout.blocks_of(self._layout.cell_of(self.cursor)) if self._layout.per_cell > 1 else None
        where = f"{span.start}-{span.stop - 1}, the first: " if span else ""
        first: Line = [
            Part("block ", "muted"), Part(f"{where}{info.block_id} ", "value"), Part(info.state, f"block_{info.state}"),
            Part("   ref_cnt ", "muted"), Part(str(info.ref_cnt), "value"), Part("   hash ", "muted"),
            Part(info.block_hash or ("known to the cache" if info.is_cached else "-")), Part("   last use ", "muted"),
            Part(f"step {info.last_use_step}" if info.last_use_step else "never seen"), Part("   owners ", "muted"),
            Part(", ".join(clean(owner) for owner in info.owners) or "nobody", "accent"),
        ]  # fmt: skip
        row = self._lit_row(state)
        second: Line = [Part("# ", "block_lit"), Part("n lights the blocks of a request", "muted")]
        if row is not None:
            second = [Part("# ", "block_lit"), Part(fit_middle(clean(row.request_id), min(24, width // 3)).rstrip(), "accent")]
            second += [
                Part(f" {row.num_blocks} blocks", "value"),
                Part(f"   {row.num_computed_tokens} tokens computed, {row.state}", "muted"),
            ]
        return [fit_line(first, width), fit_line(second, width)]

    def _holders(self, state: DashboardState, rows: int) -> list[Line]:
        """The requests that hold the most blocks."""
        holders = sorted((row for row in state.requests.values() if row.block_ids), key=lambda row: -row.num_blocks)
        lines: list[Line] = [[Part(fit("blocks  held by", _LIST_WIDTH), "header")]]
        for row in holders[: rows - 1]:
            role = "accent" if self.lights and row.request_id == self.session.selected else "text"
            lines.append([Part(number(row.num_blocks, 6) + "  ", "value"), Part(fit_middle(clean(row.request_id), _LIST_WIDTH - 8), role)])
        if len(holders) >= rows:
            lines[-1] = [Part(f"… {len(holders) - rows + 2} more", "muted")]
        return lines

    def export_table(self, state: DashboardState) -> ExportTable:
        columns = ["block_id", "state", "ref_cnt", "owners", "cached", "hash", "last_use_step"]
        infos = (state.block(block_id, recent_steps=_RECENT_STEPS) for block_id in range(1, state.blocks.num_blocks + 1))
        return ExportTable(
            columns,
            [[i.block_id, i.state, i.ref_cnt, " ".join(i.owners), i.is_cached, i.block_hash, i.last_use_step] for i in infos],
        )
