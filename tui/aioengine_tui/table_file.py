"""Tables of plain values, written as CSV or JSON: what a screen shows, for other programs."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aioengine.printable import PROSE, printable, printable_json

Plain = str | int | float | bool | None

ExportFormat = Literal["csv", "json"]


@dataclass(frozen=True, slots=True)
class ExportTable:
    """Column names and rows; every row has one value a column."""

    columns: list[str]
    rows: list[list[Plain]]


def table_text(table: ExportTable, form: ExportFormat) -> str:
    """The table as the text of a file.

    CSV: text that a spreadsheet would take for a formula gets a quote in front, and control characters become dots, because
    request ids and texts are other people's input. JSON: a list of objects; control characters are escaped.
    """
    if form == "json":
        return printable_json([dict(zip(table.columns, row, strict=True)) for row in table.rows], indent=1) + "\n"
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([_harmless(name) for name in table.columns])
    writer.writerows([[_harmless(value) for value in row] for row in table.rows])
    return text.getvalue()


def write_new_file(text: str, *, folder: Path, stem: str, suffix: str) -> Path:
    """Write a new file in `folder` and return its path. An existing file is never overwritten. Raises OSError."""
    path = folder / f"{stem}.{suffix}"
    number = 2
    while path.exists():
        path = folder / f"{stem}-{number}.{suffix}"
        number += 1
    with path.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
    return path


def without_foreign_fonts(svg: str) -> str:
    """A picture that asks for nothing from anywhere: it uses a font that is installed."""
    return re.sub(r"@font-face\s*\{[^}]*\}\s*", "", svg)


def _harmless(value: Plain) -> Plain:
    if not isinstance(value, str):
        return value
    return ("'" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else "") + printable(value, keep=PROSE)
