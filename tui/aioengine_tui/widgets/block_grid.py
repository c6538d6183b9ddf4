"""Every KV block a cell; several blocks a cell when there are more of them than cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from aioengine_tui.model.blocks import ALLOCATED, BLOCK_STATES, EMPTY, FREE_CACHED, RELEASED, SHARED, USED
from aioengine_tui.widgets.glyphs import BLOCK_GLYPHS, BLOCK_WORDS, EIGHTHS, LIT
from aioengine_tui.widgets.text import Line, Part

_LOOKS = tuple((BLOCK_GLYPHS[name], f"block_{name}") for name in BLOCK_STATES)  # by code


@dataclass(frozen=True, slots=True)
class GridLayout:
    """How blocks fall on cells: block ids start at 1, and cell i covers the `per_cell` blocks from 1 + i * per_cell on."""

    num_blocks: int
    columns: int  # cells a row
    rows: int
    per_cell: int
    cell_width: int  # characters of a cell
    gutter: int  # characters in front of a row: the id of its first block

    @classmethod
    def of(cls, num_blocks: int, *, width: int, rows: int) -> GridLayout:
        """The layout in `width` characters that shows all blocks with the fewest blocks a cell (a power of two).

        Where there is room, a row has a whole number of tens of cells, and a cell is two characters wide.
        """
        rows = max(1, rows)
        gutter = len(str(num_blocks)) + 1 if width >= 40 else 0
        room = max(1, width - gutter)
        columns = room // 10 * 10 or room
        per_cell = 1
        while num_blocks > per_cell * columns * rows:
            per_cell *= 2
        wide = room // 20 * 10
        if per_cell == 1 and wide and num_blocks <= wide * rows:
            return cls(num_blocks, wide, rows, 1, 2, gutter)
        return cls(num_blocks, columns, rows, per_cell, 1, gutter)

    @property
    def num_cells(self) -> int:
        return -(-self.num_blocks // self.per_cell)

    def cell_of(self, block_id: int) -> int:
        return (block_id - 1) // self.per_cell

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell that is drawn at a character of the grid."""
        column = (x - self.gutter) // self.cell_width
        cell = y * self.columns + column
        return cell if 0 <= column < self.columns and 0 <= cell < self.num_cells else None

    def blocks_of(self, cell: int) -> range:
        """The block ids in a cell; empty past the last block."""
        start = 1 + cell * self.per_cell
        return range(start, min(start + self.per_cell, 1 + self.num_blocks))


def grid_lines(codes: bytes, layout: GridLayout, *, lit: Iterable[int] = (), cursor: int | None = None) -> list[Line]:
    """The cells as lines.

    codes: one state code a block, block 1 first. lit: ids of blocks to light, those of a request. cursor: a block id.
    """
    cells = [_cell(codes, cell, layout.per_cell) for cell in range(layout.num_cells)]
    for cell in {layout.cell_of(block) for block in lit if 1 <= block <= layout.num_blocks}:
        cells[cell] = (LIT, "block_lit")
    if cursor is not None and 1 <= cursor <= layout.num_blocks:
        cells[layout.cell_of(cursor)] = (" ", "cursor")
    lines: list[Line] = []
    for start in range(0, len(cells), layout.columns):
        label = f"{layout.blocks_of(start).start:>{layout.gutter - 1}} " if layout.gutter else ""
        lines.append([Part(label, "muted"), *_run_lengths(cells[start : start + layout.columns], layout.cell_width)])
    return lines


def _cell(codes: bytes, cell: int, per_cell: int) -> tuple[str, str]:
    """Glyph and role of one cell.

    With several blocks a cell, what changed a moment ago comes first; then the height says how many of them are owned.
    """
    if per_cell == 1:
        return _LOOKS[codes[cell]]
    part = codes[cell * per_cell : (cell + 1) * per_cell]
    for code in (ALLOCATED, RELEASED):
        if code in part:
            return _LOOKS[code]
    num_shared = part.count(SHARED)
    num_owned = part.count(USED) + num_shared
    if num_shared * 2 > num_owned:
        return _LOOKS[SHARED]
    if num_owned:
        return EIGHTHS[max(1, num_owned * 8 // len(part))], _LOOKS[USED][1]
    return _LOOKS[FREE_CACHED if FREE_CACHED in part else EMPTY]


def _run_lengths(cells: list[tuple[str, str]], cell_width: int) -> Line:
    """One part a run of cells of the same role: fewer segments for the terminal."""
    blank = " " * (cell_width - 1)
    return [Part("".join(glyph + blank for glyph, _ in run), role) for role, run in itertools.groupby(cells, key=itemgetter(1))]


def legend(per_cell: int) -> Line:
    """What the cells mean, and how many blocks there are in one."""
    line: Line = []
    for name in BLOCK_STATES:
        glyph, role = _LOOKS[BLOCK_STATES.index(name)]
        line += [Part("▂▅█" if per_cell > 1 and name == "used" else glyph, role), Part(f" {BLOCK_WORDS.get(name, name)}  ", "muted")]
    return [*line, Part(f"1 cell = {per_cell} block{'s' if per_cell > 1 else ''}", "muted")]
