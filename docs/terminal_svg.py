"""What a terminal shows, as an SVG picture that needs no font and no host: still, or playing.

Text is placed by cells, so that columns stand whatever monospaced font a reader has; blocks and shades are drawn as rectangles,
because fonts leave gaps between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.terminal_theme import TerminalTheme

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 8.4, 18.0, 14.0
MARGIN = 12.0
_BASELINE = 13.5
_EIGHTHS = {glyph: n / 8 for n, glyph in enumerate("▁▂▃▄▅▆▇█", 1)}
_SHADES = {"░": 0.3, "▒": 0.55, "▓": 0.8}
_LEFT = {glyph: n / 8 for n, glyph in enumerate("▏▎▍▌▋▊▉", 1)}

Row = list[Segment]


def still(rows: Sequence[Row], *, theme: TerminalTheme) -> str:
    """One picture of the rows of a screen."""
    body = "".join(f'<g transform="translate(0 {y * CELL_HEIGHT:g})">{_row(row, theme)}</g>' for y, row in enumerate(rows))
    return _document(body, rows, theme=theme, style="")


def playing(frames: Sequence[Sequence[Row]], *, seconds: float, theme: TerminalTheme) -> str:
    """The frames one after the other, `seconds` each, again and again. What stays the same from one to the next is there once.

    Who asked for less motion sees the first frame.
    """
    body: list[str] = []
    rules: dict[tuple[bool, ...], str] = {}
    for y in range(len(frames[0])):
        drawn = [_row(frame[y], theme) for frame in frames]
        for content in dict.fromkeys(drawn):
            shown = tuple(other == content for other in drawn)
            name = "" if all(shown) else rules.setdefault(shown, f"f{len(rules)}")
            classes = f' class="{name}{" first" if shown[0] else ""}"' if name else ""
            body.append(f'<g{classes} transform="translate(0 {y * CELL_HEIGHT:g})">{content}</g>')
    style = "".join(_rule(name, shown, seconds) for shown, name in rules.items())
    style += "@media (prefers-reduced-motion:reduce){[class]{animation:none!important;visibility:hidden}.first{visibility:visible}}"
    return _document("".join(body), frames[0], theme=theme, style=style)


def _rule(name: str, shown: tuple[bool, ...], seconds: float) -> str:
    """Keyframes that hold until the next: only the changes are listed."""
    steps, start = [], 0
    for is_shown, run in groupby(shown):
        steps.append(f"{100 * start / len(shown):.2f}%{{visibility:{'visible' if is_shown else 'hidden'}}}")
        start += len(list(run))
    return f"@keyframes {name}{{{''.join(steps)}}}.{name}{{animation:{name} {seconds * len(shown):g}s step-end infinite}}"


def _document(body: str, rows: Sequence[Row], *, theme: TerminalTheme, style: str) -> str:
    columns = max(sum(segment.cell_length for segment in row) for row in rows)
    width, height = columns * CELL_WIDTH + 2 * MARGIN, len(rows) * CELL_HEIGHT + 2 * MARGIN
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<style>text{{font:{FONT_SIZE:g}px {font};white-space:pre}}.b{{font-weight:bold}}.u{{text-decoration:underline}}{style}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{_hex(theme.background_color)}"/>'
        f'<g transform="translate({MARGIN:g} {MARGIN:g})">{body}</g></svg>\n'
    )


def _row(row: Row, theme: TerminalTheme) -> str:
    behind: list[str] = []
    before: list[str] = []
    column = 0
    for segment in row:
        foreground, background, classes = _look(segment, theme)
        if background != _hex(theme.background_color) and segment.cell_length:
            behind.append(_rectangle(column, 0, segment.cell_length, 1, background))
        start = column
        for kind, letters in groupby(segment.text, key=_kind):
            text = "".join(letters)
            if kind == "text":
                before.append(_text(text, start, foreground, classes))
            elif kind == "block":
                before.append(_blocks(text, start, foreground))
            start += len(text)
        column += segment.cell_length
    return "".join((*behind, *before))


def _kind(letter: str) -> str:
    if letter == " ":
        return "space"
    return "block" if letter in _EIGHTHS or letter in _SHADES or letter in _LEFT else "text"


def _text(text: str, column: int, colour: str, classes: str) -> str:
    length = f' textLength="{len(text) * CELL_WIDTH:g}"' if len(text) > 1 else ""
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{column * CELL_WIDTH:g}" y="{_BASELINE:g}" fill="{colour}"{kind}{length}>{escape(text)}</text>'


def _blocks(text: str, column: int, colour: str) -> str:
    drawn = []
    for glyph, run in groupby(text):
        length = len(list(run))
        if glyph in _LEFT:
            drawn += [_rectangle(column + i, 0, _LEFT[glyph], 1, colour) for i in range(length)]
        elif glyph in _SHADES:
            drawn.append(_rectangle(column, 0.08, length, 0.84, colour, opacity=_SHADES[glyph]))
        else:
            share = _EIGHTHS[glyph]
            drawn.append(_rectangle(column, 1 - share, length, share, colour))
        column += length
    return "".join(drawn)


def _rectangle(column: float, top: float, width: float, height: float, colour: str, *, opacity: float = 1.0) -> str:
    x, y, w, h = column * CELL_WIDTH, top * CELL_HEIGHT, width * CELL_WIDTH, height * CELL_HEIGHT
    faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{colour}"{faint}/>'


def _look(segment: Segment, theme: TerminalTheme) -> tuple[str, str, str]:
    """Colours of letters and ground, and CSS classes."""
    style = segment.style
    if style is None:
        return _hex(theme.foreground_color), _hex(theme.background_color), ""
    foreground = style.color.get_truecolor(theme) if style.color is not None else theme.foreground_color
    background = style.bgcolor.get_truecolor(theme, foreground=False) if style.bgcolor is not None else theme.background_color
    if style.reverse:
        foreground, background = background, foreground
    if style.dim:
        foreground = ColorTriplet(*((a + b) // 2 for a, b in zip(foreground, background, strict=True)))
    classes = " ".join(name for name, on in (("b", style.bold), ("u", style.underline)) if on)
    return _hex(foreground), _hex(background), classes


def _hex(colour: ColorTriplet | tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
