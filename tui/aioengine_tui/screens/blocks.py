"""Screen 4: the KV cache. Every block a cell in its owner's colour, filled as far as its slots are; or many blocks a cell."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from aioengine_tui.messages import OpenPrefixTree, OpenRequest
from aioengine_tui.model.log import plural
from aioengine_tui.model.owner_marks import OwnerMark
from aioengine_tui.model.state import DashboardState
from aioengine_tui.screens.base import View
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.block_grid import CellLooks, GridContent, grid_lines, legend, owner_legend
from aioengine_tui.widgets.block_layout import GridLayout
from aioengine_tui.widgets.glyphs import BLOCK_WORDS
from aioengine_tui.widgets.text import Line, Part, clean, fit, fit_line, fit_middle, number, pack, percent, rule, side_by_side

_RECENT_STEPS = 2
_PANEL_WIDTH = 36
_WIDE = 110
_HASH_WIDTH = 9  # cells this wide show hashes


class BlocksView(View):
    screen_title: ClassVar[str] = "KV blocks"
    key_hints: ClassVar[tuple[tuple[str, str], ...]] = (
        ("←↑↓→", "cursor"), ("T", "prefix tree"), ("v", "eviction order"), ("n", "light next"), ("c", "none"), ("enter", "owner"),
        ("g", "light a group"),
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
        Binding("v", "places", "the order of eviction, also on small cells", show=False),
        Binding("g", "group(1)", "light the next KV-cache group", show=False),
        Binding("G", "group(-1)", "light the previous KV-cache group", show=False),
        Binding("T", "tree", "the prefix tree", show=False),
        Binding("enter", "open", "the owner's page", show=False),
    ]

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.cursor = 1  # a block id
        self.lights = False  # the blocks of the selected request
        self.lit_group: int | None = None  # a KV-cache group, whose blocks are lit
        self.with_places = False
        self._layout = GridLayout.of(0, width=1, rows=1)
        self._grid_row = 0
        self._looks: CellLooks = {}

    # ------------------------------------------------------------------ keys
    def action_move(self, columns: int, rows: int) -> None:
        step = columns + rows * self._layout.columns
        cell = max(0, min(self._layout.cell_of(self.cursor) + step, self._layout.num_cells - 1))
        self.cursor = self._layout.blocks_of(cell).start
        self.draw()

    def action_light(self, step: int) -> None:
        holders = [row.request_id for row in self.session.state.requests.values() if row.num_blocks]
        if holders:
            known = self.lights and self.session.selected in holders
            index = (holders.index(self.session.selected or "") + step) % len(holders) if known else 0
            self.session.selected, self.lights, self.lit_group = holders[index], True, None
        self.draw()

    def action_group(self, step: int) -> None:
        num_groups = len(self.session.state.groups)
        if num_groups > 1:
            place = -1 if self.lit_group is None and step > 0 else self.lit_group or 0
            self.lit_group, self.lights = (place + step) % num_groups, False
        self.draw()

    def action_unlight(self) -> None:
        self.lights, self.lit_group = False, None
        self.draw()

    def action_places(self) -> None:
        self.with_places = not self.with_places
        self.draw()

    def action_tree(self) -> None:
        self.post_message(OpenPrefixTree())

    def action_open(self) -> None:
        owners = self.session.state.blocks.owners(self.cursor)
        if owners:
            self.post_message(OpenRequest(owners[0]))

    async def on_click(self, event: events.Click) -> None:
        cell = self._layout.cell_at(event.x, event.y - self._grid_row)
        if cell is not None:
            self.cursor = self._layout.blocks_of(cell).start
            self.draw()

    # ------------------------------------------------------------------ drawing
    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        if not state.blocks.num_blocks:
            return [[Part("the number of blocks is not known yet", "muted")]]
        wide = width >= _WIDE
        grid_width = width - _PANEL_WIDTH - 2 if wide else width
        num_foot = 0 if wide else 3 if height >= 14 else 2
        rows = max(1, height - 2 - num_foot)
        self._layout = layout = GridLayout.of(state.blocks.num_blocks, width=grid_width, rows=rows)
        self.cursor = max(1, min(self.cursor, layout.num_blocks))
        content = self._content(state, with_places=wide or self.with_places or layout.per_cell == 1)
        head = [_counts(state, width), fit_line(legend(layout, width, lit=self._lit_words()), width)]
        self._grid_row = len(head)
        grid = grid_lines(content, layout, cursor=self.cursor, with_places=self.with_places, looks=self._looks)
        grid = (grid + [[] for _ in range(rows)])[:rows]
        if wide:
            grid = side_by_side([grid, self._panel(state, content, rows)], [grid_width, _PANEL_WIDTH], gap=2)
        foot: list[Line] = []
        if not wide:
            facts = self._facts(state, content)
            packed = pack(
                [[Part(f"{label} ", "muted"), Part(value, "value")] for label, value in facts], width, max_lines=num_foot - 1, gap="   "
            )
            foot = [*packed, *([] for _ in range(num_foot - 1 - len(packed))), owner_legend(self._owners(state), width)]
        return [fit_line(line, width) for line in (*head, *grid, *foot)][:height]

    def _content(self, state: DashboardState, *, with_places: bool) -> GridContent:
        marks: dict[int, OwnerMark] = {}
        ref_cnts: dict[int, int] = {}
        fills: dict[int, int] = {}
        size = state.block_size
        self.session.owner_marks.forget_all_but(state.requests)
        for row in state.requests.values():
            if not row.num_blocks:
                continue
            mark = self.session.owner_marks.of(row.request_id)
            for block_id in row.held_block_ids:
                if block_id in marks:
                    ref_cnts[block_id] = ref_cnts.get(block_id, 1) + 1
                else:
                    marks[block_id] = mark
            if size:
                for table in row.tables:
                    for index in range(row.num_computed_tokens // size, len(table)):
                        fills[table[index]] = max(0, row.num_computed_tokens - index * size)
        blocks = state.blocks
        wants_hashes = self._layout.inner_width >= _HASH_WIDTH - 1
        infos = (blocks.info(block_id) for block_id in range(1, blocks.num_blocks + 1)) if wants_hashes else ()
        return GridContent(
            codes=state.block_codes(recent_steps=_RECENT_STEPS),
            marks=marks,
            block_size=size,
            fills=fills,
            ref_cnts=ref_cnts,
            places={block_id: place for place, block_id in enumerate((blocks.eviction_order() or ()) if with_places else (), 1)},
            evicted=frozenset(state.current.evicted_ids) if state.current is not None else frozenset(),
            lit=self._lit_blocks(state),
            hashes={info.block_id: info.block_hash for info in infos if info.block_hash},
        )

    def _lit_blocks(self, state: DashboardState) -> frozenset[int]:
        """Those of the request or of the KV-cache group that is lit; none: nothing is."""
        if self.lit_group is not None:
            return frozenset(state.blocks.owned_by_group(self.lit_group))
        row = state.row(self.session.selected) if self.lights and self.session.selected is not None else None
        return frozenset(row.held_block_ids) if row is not None else frozenset()

    def _lit_words(self) -> str:
        if self.lit_group is not None:
            return f"KV-cache group {self.lit_group}"
        return clean(self.session.selected) if self.lights and self.session.selected is not None else ""

    def _owners(self, state: DashboardState) -> list[tuple[OwnerMark, int]]:
        """The requests that hold blocks, the one with the most first."""
        holders = sorted((row for row in state.requests.values() if row.num_blocks), key=lambda row: -row.num_blocks)
        return [(self.session.owner_marks.of(row.request_id), row.num_blocks) for row in holders]

    # ------------------------------------------------------------------ what is under the cursor
    def _facts(self, state: DashboardState, content: GridContent) -> list[tuple[str, str]]:
        """(label, value) of the cell under the cursor."""
        if self._layout.per_cell > 1:
            return self._cell_facts(state, content)
        block_id, size = self.cursor, state.block_size
        info = state.block(block_id, recent_steps=_RECENT_STEPS)
        facts = [("block", f"{block_id} {BLOCK_WORDS.get(info.state, info.state)}"), ("ref_cnt", str(info.ref_cnt))]
        if info.owners:
            facts.append(("owners", _some([clean(owner) for owner in info.owners])))
        owner = state.row(info.owners[0]) if info.owners else None
        if len(state.groups) > 1 and (info.owners or info.is_cached):
            facts.append(("KV-cache group", _group_words(state, info.group_id)))
        table = next((table for table in owner.tables if block_id in table), None) if owner is not None else None
        if size and table is not None:
            start = table.index(block_id) * size
            facts.append(("holds positions", f"{start} to {start + size - 1}"))
            facts.append(("slots in use", f"{content.fills.get(block_id, size)} of {size}"))
        if size:
            facts.append(("slot numbers", f"{block_id * size} to {block_id * size + size - 1}"))
        facts.append(("hash", info.block_hash or ("known to the cache" if info.is_cached else "-")))
        if block_id in content.places:
            facts.append(("eviction order", f"{content.places[block_id]} of {len(content.places)} free"))
        facts.append(("last use", f"step {info.last_use_step}" if info.last_use_step else "never seen"))
        return facts

    def _cell_facts(self, state: DashboardState, content: GridContent) -> list[tuple[str, str]]:
        blocks = self._layout.blocks_of(self._layout.cell_of(self.cursor))
        infos = [state.blocks.info(block_id) for block_id in blocks]
        owners = Counter(owner for info in infos for owner in info.owners)
        num_owned = sum(bool(info.owners) for info in infos)
        num_cached = sum(info.is_cached and not info.owners for info in infos)
        facts = [("blocks", f"{blocks.start} to {blocks.stop - 1}"), ("used", f"{num_owned} of {len(blocks)}")]
        facts += [("free, cached", str(num_cached)), ("empty", str(len(blocks) - num_owned - num_cached))]
        facts.append(("owners", _some([f"{clean(owner)} {count}" for owner, count in owners.most_common()]) or "nobody"))
        return facts

    def _panel(self, state: DashboardState, content: GridContent, rows: int) -> list[Line]:
        """Beside a wide grid: the cell under the cursor, the owners, what is evicted next and what just was."""
        width = _PANEL_WIDTH
        lines: list[Line] = [rule("under the cursor", width)]
        for label, value in self._facts(state, content):
            wrapped = textwrap.wrap(value, width - 16) or [""]
            lines += [[Part(f"{label if index == 0 else '':<16}", "muted"), Part(text, "value")] for index, text in enumerate(wrapped[:4])]
        lines += self._group_lines(state, width)
        tail = self._queue_lines(state, content, width)
        owners = self._owners(state)
        lines.append(rule("owners", width, f"{len(owners)}"))
        room = max(1, rows - len(lines) - len(tail))
        for mark, num_blocks in owners[: room if len(owners) <= room else room - 1]:
            role = "accent" if self.lights and mark.request_id == self.session.selected else "text"
            lines.append(
                [
                    Part(f" {mark.letter} ", f"owner_{mark.colour}"),
                    Part(number(num_blocks, 6) + " ", "value"),
                    Part(fit_middle(clean(mark.request_id), width - 10), role),
                ]
            )
        if len(owners) > room:
            lines.append([Part(f"… {len(owners) - room + 1} more", "muted")])
        lines += [[] for _ in range(rows - len(lines) - len(tail))]
        return lines + tail

    def _group_lines(self, state: DashboardState, width: int) -> list[Line]:
        """How many blocks each KV-cache group holds; nothing where there is only one."""
        if len(state.groups) == 1:
            return []
        lines: list[Line] = [rule("KV-cache groups", width, "g lights one")]
        for group_id in range(len(state.groups)):
            role = "accent" if group_id == self.lit_group else "text"
            held = number(len(state.blocks.owned_by_group(group_id)), 6)
            lines.append([Part(f"{held} ", "value"), Part(fit(_group_words(state, group_id), width - 8), role)])
        return lines

    def _queue_lines(self, state: DashboardState, content: GridContent, width: int) -> list[Line]:
        lines: list[Line] = [rule("free queue, next first", width, f"{len(content.places)}" if content.places else "")]
        first = list(content.places)[:80]
        text = " ".join(map(str, first)) if first else "not told by this recording" if state.blocks.eviction_order() is None else "empty"
        wrapped = textwrap.wrap(text, width)
        lines += [[Part(line, "place" if first else "muted")] for line in wrapped[:5]]
        evicted = sorted(content.evicted)
        lines.append(rule(f"evicted in step {state.last_step_id}", width, f"{len(evicted)}"))
        lines += [[Part(line, "bad")] for line in textwrap.wrap(" ".join(map(str, evicted)), width)[:2] or ["-"]]
        return lines

    def export_table(self, state: DashboardState) -> ExportTable:
        columns = ["block_id", "state", "ref_cnt", "owners", "cached", "hash", "last_use_step", "kv_cache_group"]
        infos = (state.block(block_id, recent_steps=_RECENT_STEPS) for block_id in range(1, state.blocks.num_blocks + 1))
        return ExportTable(
            columns,
            [[i.block_id, i.state, i.ref_cnt, " ".join(i.owners), i.is_cached, i.block_hash, i.last_use_step, i.group_id] for i in infos],
        )


def _counts(state: DashboardState, width: int) -> Line:
    blocks = state.blocks
    counts = [
        ("used", f"{blocks.num_used}/{blocks.num_blocks} ({percent(blocks.num_used / blocks.num_blocks)})"),
        ("shared", str(blocks.num_shared)),
        ("free", f"{blocks.num_free} ({blocks.num_free_cached} cached)"),
        ("evicted" if state.totals.origin == "engine" else "evicted since attach", str(state.totals.num_evicted_blocks)),
    ]
    if len(state.groups) > 1:
        counts.append(("by group", " ".join(str(len(blocks.owned_by_group(group_id))) for group_id in range(len(state.groups)))))
    return pack([[Part(f"{label} ", "muted"), Part(value, "value")] for label, value in counts], width)[0]


def _group_words(state: DashboardState, group_id: int) -> str:
    """Its number, and what its layers see."""
    if group_id >= len(state.groups):
        return str(group_id)
    group = state.groups[group_id]
    sees = "sees all" if group.sliding_window is None else f"window {group.sliding_window}"
    return f"{group_id} {sees}, {plural(len(group.layers), 'layer')}"


def _some(names: list[str], most: int = 4) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
