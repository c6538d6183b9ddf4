"""Tables of fixed column widths: columns go by importance when there is no room, and nothing is ever half a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aioengine_tui.widgets.text import Hot, Line, Part, clean, fit, fit_middle

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table.

    cell: the parts of a row's cell, exactly `width` cells wide. plain: its value for sorting and export; None sorts last.
    importance: columns with the lowest one go first when there is no room. max_width: where there is room
    left over it grows to this.
    """

    name: str
    title: str
    width: int
    cell: Callable[[Row, int], Line]
    plain: Callable[[Row], str | int | float | None]
    importance: int = 5
    right: bool = True
    max_width: int = 0


def text_column(name: str, title: str, width: int, plain: Callable[[Row], str], *, importance: int = 5, max_width: int = 0) -> Column[Row]:
    """A column of text; a long one is cut in its middle."""
    return Column(
        name,
        title,
        width,
        lambda row, size: [Part(fit_middle(clean(plain(row)), size))],
        plain,
        importance=importance,
        right=False,
        max_width=max_width,
    )


def choose_columns(columns: Sequence[Column[Row]], width: int) -> list[tuple[Column[Row], int]]:
    """The columns that fit side by side with one blank between them, and the width of each.

    The least important goes first; growing columns share what is left.
    """
    chosen = list(columns)
    while len(chosen) > 1 and sum(column.width + 1 for column in chosen) - 1 > width:
        chosen.remove(min(reversed(chosen), key=lambda column: column.importance))
    spare = max(0, width - sum(column.width + 1 for column in chosen) + 1)
    sizes = [column.width for column in chosen]
    growing = [index for index, column in enumerate(chosen) if column.max_width > column.width]
    while spare and growing:  # a share each, until each has all that it takes
        share = max(1, spare // len(growing))
        for index in growing[:spare]:
            extra = min(share, chosen[index].max_width - sizes[index], spare)
            sizes[index] += extra
            spare -= extra
        growing = [index for index in growing if sizes[index] < chosen[index].max_width]
    return list(zip(chosen, sizes, strict=True))


def header_line(chosen: Sequence[tuple[Column[Row], int]], *, sort: str = "", reverse: bool = False, can_sort: bool = True) -> Line:
    """The titles; an arrow says by which column the rows are sorted and whether upwards. A click on a title sorts by it."""
    line: Line = []
    for index, (column, size) in enumerate(chosen):
        if index:
            line.append(Part(" ", "header"))
        is_sort = column.name == sort
        arrow = ("↓" if reverse else "↑") if is_sort else ""
        text = fit(column.title[: size - len(arrow)] + arrow, size, right=column.right)
        role = "header_on" if is_sort else "header"
        line.append(Hot(text, role, f"sort_by('{column.name}')") if can_sort else Part(text, role))
    return line


def row_line(chosen: Sequence[tuple[Column[Row], int]], row: Row, *, under_cursor: bool) -> Line:
    line: Line = []
    for index, (column, size) in enumerate(chosen):
        if index:
            line.append(Part(" "))
        line.extend(column.cell(row, size))
    return [Part(text, "cursor") for text, _ in line] if under_cursor else line


def sorted_rows(rows: Sequence[Row], column: Column[Row], *, reverse: bool) -> list[Row]:
    """By the column's value; rows without one come last in both directions. The sort is stable."""
    known: list[Row] = []
    unknown: list[Row] = []
    for row in rows:
        (unknown if column.plain(row) is None else known).append(row)
    known.sort(key=lambda row: _sort_key(column.plain(row)), reverse=reverse)
    return known + unknown


def _sort_key(value: str | int | float | None) -> tuple[int, float, str]:
    return (1, 0.0, value) if isinstance(value, str) else (0, float(value or 0), "")
