"""Styled text as plain data, and numbers that are honest about their width.

A line is a list of parts; a part is a text and the name of a role ("prefill", "muted", ...) that the theme gives a colour
and attributes. Lines know nothing of Textual, so a test reads them as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from aioengine.printable import printable

CLIPPED = "…"
"""Stands where text or digits were cut off. A clipped number without it would be a plausible wrong number."""


class Part(NamedTuple):
    text: str
    role: str = "text"


Line = list[Part]


def line_text(line: Line) -> str:
    """The line without its roles."""
    return "".join(part.text for part in line)


def lines_text(lines: Iterable[Line]) -> str:
    """The lines as they stand on the screen, trailing blanks removed."""
    return "\n".join(line_text(line).rstrip() for line in lines)


clean = printable
"""Request ids, prompts and names are other people's text. `fit_line` does it too, so what is forgotten only spoils the widths."""


def width_of(text: str) -> int:
    """Cells that the text takes on the screen."""
    return len(text) if text.isascii() else cell_len(text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """The text in exactly `width` cells: padded, or cut with CLIPPED at the end."""
    if width <= 0:
        return ""
    size = width_of(text)
    if size == width:
        return text
    if size < width:
        blank = " " * (width - size)
        return blank + text if right else text + blank
    return CLIPPED if width == 1 else set_cell_size(text, width - 1) + CLIPPED


def fit_middle(text: str, width: int) -> str:
    """As `fit`, but the cut is in the middle: paths and ids differ most at their ends."""
    if width < 5 or width_of(text) <= width or not text.isascii():
        return fit(text, width)
    head = (width - 1) // 2
    return text[:head] + CLIPPED + text[len(text) - (width - 1 - head) :]


def number(value: float | None, width: int) -> str:
    """A number right-aligned in `width` cells: exact if it fits, else with a unit (12.3k), else only CLIPPED.

    None, what is not known, is a dash.
    """
    if value is None:
        return fit("-", width, right=True)
    plain = str(value) if isinstance(value, int) else _float_text(value, width)
    if len(plain) <= width:
        return plain.rjust(width)
    for scale, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        scaled = value / scale
        if 1 <= abs(scaled) < 1000:
            for digits in (2, 1, 0):
                text = f"{scaled:.{digits}f}{unit}"
                if len(text) <= width:
                    return text.rjust(width)
    return CLIPPED.rjust(width)


def _float_text(value: float, width: int) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    text = f"{value:.{digits}f}"
    return text if len(text) <= width else f"{value:.0f}"


def seconds(value: float | None) -> str:
    """A duration with three significant digits or so: 850us, 12.3ms, 1.25s, 3m07s, 2h05m."""
    if value is None:
        return "-"
    if value < 0:
        return "-" + seconds(-value)
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f}us"
    if value < 1:
        return f"{value * 1e3:.1f}ms" if value < 0.1 else f"{value * 1e3:.0f}ms"
    if value < 60:
        return f"{value:.2f}s" if value < 10 else f"{value:.1f}s"
    if value < 3600:
        return f"{int(value) // 60}m{int(value) % 60:02d}s"
    if value < 86400:
        return f"{int(value) // 3600}h{int(value) % 3600 // 60:02d}m"
    return f"{int(value) // 86400}d{int(value) % 86400 // 3600:02d}h"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage; a dash for None. 100% and 0% are said only of exactly all and nothing."""
    if share is None:
        return "-"
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share * 100:.1f}%" if share < 0.9995 else f"{share * 100:.0f}%"


def fit_line(line: Line, width: int) -> Line:
    """The line in exactly `width` cells."""
    fitted: Line = []
    left = width
    for index, (text, role) in enumerate(line):
        if left <= 0:
            break
        text = printable(text)  # nothing reaches the screen but through here
        size = width_of(text)
        if size > left or (size == left and any(part.text for part in line[index + 1 :])):
            fitted.append(Part(fit(text, left) if size > left else fit(text + " ", left), role))
            return fitted
        fitted.append(Part(text, role))
        left -= size
    if left > 0:
        fitted.append(Part(" " * left, "text"))
    return fitted


def wrap_line(line: Line, width: int, *, indent: int = 0) -> list[Line]:
    """The line in as many lines of at most `width` cells as it takes, broken at blanks; all but the first are indented.

    A word that is wider than a line is cut, with CLIPPED.
    """
    indent = min(indent, width // 2)
    lines: list[Line] = [[]]
    used = 0
    for text, role in line:
        for word in re.findall(r" *[^ ]+ *|^ +$", text):
            size, bare = width_of(word), width_of(word.rstrip(" "))
            if used + bare > width and used > (indent if len(lines) > 1 else 0):
                lines.append([Part(" " * indent)])
                word = word.lstrip(" ")
                used, size, bare = indent, width_of(word), width_of(word.rstrip(" "))
            if used + bare > width:
                word = fit(word.rstrip(" "), width - used)
            elif used + size > width:
                word = word[: len(word) - (used + size - width)]
            lines[-1].append(Part(word, role))
            used += width_of(word)
    return lines


def beside(left: Line, right: Line, width: int, *, fill: str = " ", role: str = "text") -> Line:
    """`left` at the left edge and `right` at the right edge; the right one goes when both do not fit."""
    left_size, right_size = width_of(line_text(left)), width_of(line_text(right))
    gap = width - left_size - right_size
    if gap < 1:
        return fit_line(left, width)
    return [*left, Part(fill * gap, role), *right]


def rule(title: str, width: int, value: str = "", *, title_role: str = "title") -> Line:
    """A heading: the title, a thin line, and a value at the right end. The title is cut before the value is."""
    tail = [Part(" ", "text"), Part(value, "value"), Part(" ", "text")] if value else []
    room = width - 4 - width_of(line_text(tail))
    head = [Part("─ ", "border"), Part(fit(title, max(1, min(room, width_of(title)))), title_role), Part(" ", "text")]
    return fit_line(beside(head, tail, width, fill="─", role="border"), width)


def side_by_side(blocks: list[list[Line]], widths: list[int], gap: int = 1) -> list[Line]:
    """Blocks of lines, each `widths[i]` cells wide, next to each other."""
    lines: list[Line] = []
    for y in range(max((len(block) for block in blocks), default=0)):
        line: Line = []
        for index, (block, width) in enumerate(zip(blocks, widths, strict=True)):
            if index:
                line.append(Part(" " * gap))
            line.extend(fit_line(block[y], width) if y < len(block) else [Part(" " * width)])
        lines.append(line)
    return lines
