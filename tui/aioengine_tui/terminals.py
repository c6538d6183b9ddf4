"""What the terminal can do, and how to do without: the signs of the dashboard in ASCII, and where to draw."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from textual.driver import Driver

_SIGNS = {
    "─": "-", "│": "|", "└": "+", "┤": "|", "┴": "+", "├": "|", "┬": "+", "·": ".", "…": ">", "█": "#", "▓": "%", "▒": "=", "░": ":",
    "▚": "&", "▌": "m", "▁": "_", "▂": "_", "▃": ",", "▄": "-", "▅": "-", "▆": "=", "▇": "=", "↑": "^", "↓": "v", "←": "<", "→": ">",
    "▏": "|", "▎": "|", "▍": "|", "▋": "m", "▊": "m", "▉": "m", "»": "@", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip

_DOTS = " .,:;|iI#"  # by the number of dots of a braille cell


class _AsciiTable(dict[int, str]):
    """For `str.translate`: a sign of ASCII in as many cells for every character; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        from rich.cells import cell_len

        character = chr(code)
        if code < 128:
            sign = character
        elif 0x2800 <= code <= 0x28FF:
            sign = _DOTS[(code - 0x2800).bit_count()]
        else:
            sign = _SIGNS.get(character, "?" * cell_len(character))
        self[code] = sign
        return sign


def as_ascii(text: str) -> str:
    """The text in ASCII, in as many cells: the dashboard's signs have a substitute each, other characters become "?"."""
    return text if text.isascii() else text.translate(_AsciiTable())


def wants_ascii(environ: Mapping[str, str]) -> bool:
    """The terminal, or the locale, knows no more than ASCII: TERM is a plain one, or the encoding is not UTF-8."""
    if environ.get("TERM", "") in ("dumb", "linux", "vt100", "vt102", "vt220", "ansi"):
        return True
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environ.get(name))), "")
    if not locale:
        return False  # nothing was said: Python itself takes UTF-8
    encoding = locale.partition(".")[2].partition("@")[0]
    return encoding.lower().replace("-", "") != "utf8" and os.name == "posix"


def can_draw(environ: Mapping[str, str]) -> bool:
    """The terminal can place the cursor; else states are printed below each other."""
    return environ.get("TERM", "") not in ("dumb", "unknown")


def driver_for_stdout() -> type[Driver] | None:
    """A driver that draws on standard output. Textual's own draws on standard error, which may go to a file of messages.

    None where there is no such difference (Windows, a browser).
    """
    import sys

    if os.name != "posix" or "TEXTUAL_DRIVER" in os.environ:
        return None
    from textual.drivers.linux_driver import LinuxDriver

    class StdoutDriver(LinuxDriver):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            assert sys.__stdout__ is not None, "a terminal"
            self._file = sys.__stdout__

    return StdoutDriver
