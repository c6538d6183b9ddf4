"""Styled text as plain data, and numbers that are honest about their width.

A line is a list of parts; a part is a text and the name of a role ("prefill", "muted", ...) that the theme gives a colour
and attributes. Lines know nothing of Textual, so a test reads them as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from rich.cells import cell_len, set_cell_size

from aioengine.printable import printable

CLIPPED = "…"
"""Stands where text or digits were cut off. A clipped number without it would be a plausible wrong number."""


class Part(NamedTuple):
    text: str
    role: str = "text"


class Hot(Part):
    """A part that can be clicked; `action` is what a click does, in Textual's form ("app.show('step')", "sort_by('ttft')").

    Equal to a part of the same text and role: what a click does is not seen.
    """

    action: str

    def __new__(cls, text: str, role: str, action: str) -> Self:
        part = super().__new__(cls, text, role)
        part.action = action
        return part


Line = list[Part]


def line_text(line: Line) -> str:
    """The line without its roles."""
    return "".join(part.text for part in line)


def hot_at(line: Line, x: int) -> str | None:
    """What a click on cell `x` of the line does, if anything."""
    for part in line:
        x -= width_of(part.text)
        if x < 0:
            return part.action if isinstance(part, Hot) else None
    return None


def with_text(part: Part, text: str) -> Part:
    """The part with another text."""
    return Hot(text, part.role, part.action) if isinstance(part, Hot) else Part(text, part.role)


def lines_text(lines: Iterable[Line]) -> str:
    """The lines as they stand on the screen, trailing blanks removed."""
    return "\n".join(line_text(line).rstrip() for line in lines)


_NUMBER_AT_END = re.compile(r"(?<![\w.,/·…-])[\d.,/]*\d[.,/]?$")
"""Not the digits of an id or of a word."""

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
    kept = set_cell_size(text, width - 1) if width > 1 else ""
    cut_number = _NUMBER_AT_END.search(kept)
    if cut_number is not None:  # a number that lost digits, or might have: none of it is shown
        return fit(kept[: cut_number.start()] + CLIPPED, width)
    return kept + CLIPPED


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
    if value < 0.9995:
        return f"{value * 1e3:.1f}ms" if value < 0.09995 else f"{value * 1e3:.0f}ms"
    if value < 59.95:
        return f"{value:.2f}s" if value < 9.995 else f"{value:.1f}s"
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


class FittedLine(list[Part]):
    """What `fit_line` made: it need not be done again. Whoever adds to a line makes a new one of it."""

    __slots__ = ("width",)

    def __init__(self, parts: Line, width: int) -> None:
        super().__init__(parts)
        self.width = width


def fit_line(line: Line, width: int) -> Line:
    """The line in exactly `width` cells."""
    if isinstance(line, FittedLine) and line.width == width:
        return line
    fitted: Line = []
    left = width
    for index, part in enumerate(line):
        if left <= 0:
            break
        text = printable(part.text)  # nothing reaches the screen but through here
        size = width_of(text)
        if size > left or (size == left and any(other.text for other in line[index + 1 :])):
            cut = fit(text, left) if size > left else fit(text + " ", left)
            if cut[0] == CLIPPED and fitted and fitted[-1].text[-1:].isdigit():
                cut = fit("", left)  # right behind a whole number the mark would say that it lost digits
            fitted.append(with_text(part, cut))
            return FittedLine(fitted, width)
        fitted.append(part if text is part.text else with_text(part, text))
        left -= size
    if left > 0:
        fitted.append(Part(" " * left, "text"))
    return FittedLine(fitted, width)


def pack(items: Sequence[Line], width: int, *, max_lines: int = 1, gap: str = "  ") -> list[Line]:
    """Items next to each other on up to `max_lines` lines, each item whole; a mark stands where the rest was left out."""
    lines: list[Line] = [[]]
    used = 0
    for index, item in enumerate(items):
        size = width_of(line_text(item))
        if used and size > width - used - len(gap) and len(lines) < max_lines:
            lines.append([])
            used = 0
        room = width - used - (len(gap) if used else 0)
        must_leave = len(gap) + 1 if len(lines) == max_lines and not _fits(items[index + 1 :], room - size, len(gap)) else 0
        if size + must_leave > room:
            if room > 0:
                lines[-1].append(Part((gap if used else "") + CLIPPED, "muted"))
            return lines
        if used:
            lines[-1].append(Part(gap, "text"))
            used += len(gap)
        lines[-1] += item
        used += size
    return lines


def _fits(items: Sequence[Line], room: int, gap: int) -> bool:
    return sum(gap + width_of(line_text(item)) for item in items) <= room


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` cells, at blanks where there are any; never empty, nothing is left out."""
    width = max(1, width)
    lines: list[str] = []
    line = ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if width_of(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        while width_of(word) > width:
            head = set_cell_size(word, width).rstrip(" ") or word[:1]
            lines.append(head)
            word = word[len(head) :]
        line = word
    return [*lines, line] if line or not lines else lines


def wrap_to(text: str, width: int, num_lines: int) -> list[str]:
    """As `wrap`, in at most so many lines; where that is too few, the last one ends with CLIPPED behind a whole word."""
    lines = wrap(text, width)
    if len(lines) <= num_lines:
        return lines
    kept = lines[:num_lines]
    while kept[-1] and width_of(kept[-1]) + 2 > width:
        kept[-1] = kept[-1].rpartition(" ")[0]
    kept[-1] = f"{kept[-1]} {CLIPPED}".lstrip()
    return kept


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


def rule(title: str, width: int, value: str = "", *, title_role: str = "title", note: str = "", action: str = "") -> Line:
    """A heading: the title, a thin line, and a value at the right end. The title is cut before the value is.

    note: of less weight than the value, after it; left out where there is no room. action: what a click on the title does.
    """
    tail = [Part(" ", "text"), Part(value, "value"), Part(" ", "text")] if value else []
    room = width - 4 - width_of(line_text(tail))
    if note and room - width_of(note) - 1 >= width_of(title):
        tail = [*(tail or [Part(" ", "text")]), Part(note + " ", "muted")]
        room = width - 4 - width_of(line_text(tail))
    text = fit(title, max(1, min(room, width_of(title))))
    head = [Part("─ ", "border"), Hot(text, title_role, action) if action else Part(text, title_role), Part(" ", "text")]
    return fit_line(beside(head, tail, width, fill="─", role="border"), width)


def side_by_side(blocks: list[list[Line]], widths: list[int], gap: int = 1) -> list[Line]:
    """Blocks of lines, each `widths[i]` cells wide, next to each other."""
    lines: list[Line] = []
    total = sum(widths) + gap * (len(widths) - 1)
    for y in range(max((len(block) for block in blocks), default=0)):
        line: Line = []
        for index, (block, width) in enumerate(zip(blocks, widths, strict=True)):
            if index:
                line.append(Part(" " * gap))
            line.extend(fit_line(block[y], width) if y < len(block) else [Part(" " * width)])
        lines.append(FittedLine(line, total))
    return lines
