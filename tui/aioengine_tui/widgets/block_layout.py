"""How the blocks of a KV cache fall on the cells of a screen: large cells for few blocks, many blocks a cell for many."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_CELL = (48, 14)  # characters; a larger cell has nothing more to say
_MIN_GUTTER_WIDTH = 40


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Block ids start at 1, and cell i covers the `per_cell` blocks from 1 + i * per_cell on."""

    num_blocks: int
    columns: int  # cells a row
    per_cell: int
    cell_width: int  # characters of a cell
    cell_height: int
    gutter: int  # characters in front of a row: the id of its first block

    @classmethod
    def of(cls, num_blocks: int, *, width: int, rows: int) -> GridLayout:
        """The largest cells with which all blocks fit into `width` x `rows` characters; several blocks a cell where none do."""
        gutter = len(str(num_blocks)) + 1 if width >= _MIN_GUTTER_WIDTH else 0
        room, rows = max(1, width - gutter), max(1, rows)
        if num_blocks > room * rows:
            return cls(num_blocks, room, -(-num_blocks // (room * rows)), 1, 1, gutter)
        columns, cell_width, cell_height = max(_sizes(max(1, num_blocks), room=room, rows=rows), key=_merit)
        return cls(num_blocks, columns, 1, cell_width, cell_height, gutter)

    @property
    def num_cells(self) -> int:
        return -(-self.num_blocks // self.per_cell)

    @property
    def gap(self) -> int:
        """Blank characters at the right end of a cell."""
        return int(self.cell_width >= 3)

    @property
    def inner_width(self) -> int:
        """Characters of a cell that are drawn."""
        return self.cell_width - self.gap

    @property
    def inner_height(self) -> int:
        """Lines of a cell that are drawn; below a tall one there is a blank line."""
        return self.cell_height - (self.cell_height >= 3)

    def cell_of(self, block_id: int) -> int:
        return (block_id - 1) // self.per_cell

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell that is drawn at a character of the grid."""
        column, row = (x - self.gutter) // self.cell_width, y // self.cell_height
        cell = row * self.columns + column
        return cell if 0 <= column < self.columns and 0 <= cell < self.num_cells else None

    def blocks_of(self, cell: int) -> range:
        """The block ids in a cell; empty past the last block."""
        start = 1 + cell * self.per_cell
        return range(start, min(start + self.per_cell, 1 + self.num_blocks))


def _sizes(num_blocks: int, *, room: int, rows: int) -> list[tuple[int, int, int]]:
    """(columns, cell width, cell height) of every grid that holds all blocks, about twice as wide as high a cell, or wider."""
    sizes = []
    for columns in range(1, min(num_blocks, room) + 1):
        cell_rows = -(-num_blocks // columns)
        if cell_rows > rows:
            continue
        cell_width = min(room // columns, _MAX_CELL[0])
        cell_height = min(rows // cell_rows, _MAX_CELL[1], max(1, cell_width // 2))
        sizes.append((columns, min(cell_width, 6 * cell_height + 2), cell_height))
    return sizes


def _merit(size: tuple[int, int, int]) -> tuple[int, int, int]:
    """More characters a cell first; then rows of whole tens, which are easier to count; then longer rows."""
    columns, cell_width, cell_height = size
    return cell_width * cell_height, int(columns % 10 == 0), columns
