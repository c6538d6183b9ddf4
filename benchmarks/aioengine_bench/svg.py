"""Small SVG charts as text: lines, steps, bars, lanes. No script, no font, no reference to anything outside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 320
_CHAR_WIDTH = 6.3  # of the small print, on average; the page's own font is not known here
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 46

# Okabe and Ito's colours, which people with any colour vision can tell apart; dashes repeat the distinction.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2")

Style = Literal["line", "step", "points"]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    style: Style = "line"
    labels: Sequence[str] = ()  # one a point, where points have names


@dataclass(frozen=True, slots=True)
class Interval:
    """A box in a lane of a timeline."""

    lane: str
    start: float
    end: float
    title: str
    color: int = 0


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float  # pixels
    end: float

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Four to eight round numbers."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 8)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _axis(values: Sequence[float], start: float, end: float, *, from_zero: bool) -> _Axis:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(0.0, low) if from_zero else low
    return _Axis(low, high if high > low else low + 1.0, start, end)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _open(title: str, height: int = HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>"
        f'<text x="{WIDTH / 2}" y="18" class="title">{escape(title)}</text>'
    )


def _frame(x: _Axis, y: _Axis, x_label: str, y_label: str) -> Iterator[str]:
    for tick in y.ticks():
        at = y.place(tick)
        yield f'<line x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
        yield f'<text x="{x.start - 6}" y="{at + 4:.1f}" class="tick end">{_number(tick)}</text>'
    for tick in x.ticks():
        at = x.place(tick)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y.start}" y2="{y.start + 4}" class="axis"/>'
        yield f'<text x="{at:.1f}" y="{y.start + 17}" class="tick middle">{_number(tick)}</text>'
    yield f'<line x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}" class="axis"/>'
    yield f'<text x="{(x.start + x.end) / 2}" y="{y.start + 36}" class="label middle">{escape(x_label)}</text>'
    middle = (y.start + y.end) / 2
    yield f'<text x="14" y="{middle}" class="label middle" transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'


def line_chart(title: str, series: Sequence[Series], *, x_label: str, y_label: str, y_from_zero: bool = True) -> str:
    """One curve a series. Series without points are named in the legend all the same."""
    columns = _legend_columns([one.name for one in series])
    xs = [point[0] for one in series for point in one.points]
    ys = [point[1] for one in series for point in one.points]
    x = _axis(xs, _LEFT, WIDTH - _RIGHT, from_zero=False)
    y = _axis(ys, HEIGHT - _BOTTOM, _TOP + 14 * math.ceil(len(series) / columns), from_zero=y_from_zero)
    parts = [_open(title), *_frame(x, y, x_label, y_label)]
    for index, one in enumerate(series):
        color, dash = COLORS[index % len(COLORS)], _DASHES[index % len(_DASHES)]
        placed = [(x.place(px), y.place(py)) for px, py in one.points]
        if one.style != "points" and placed:
            parts.append(
                f'<path d="{_path(placed, one.style)}" fill="none" stroke="{color}" stroke-width="1.8" stroke-dasharray="{dash}"/>'
            )
        if one.style == "points" or one.labels or len(placed) <= 40:
            names = one.labels or [f"{_number(px)}, {_number(py)}" for px, py in one.points]
            for (px, py), name in zip(placed, names, strict=True):
                parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{color}"><title>{escape(name)}</title></circle>')
        legend_x = _LEFT + (index % columns) * (WIDTH - _LEFT) // columns
        legend_y = _TOP + 14 * (index // columns)
        parts.append(f'<line x1="{legend_x}" x2="{legend_x + 22}" y1="{legend_y}" y2="{legend_y}" stroke="{color}" stroke-width="2" ')
        parts.append(f'stroke-dasharray="{dash}"/><text x="{legend_x + 27}" y="{legend_y + 4}" class="tick">{escape(one.name)}</text>')
    return "".join([*parts, "</svg>"])


def _legend_columns(names: Sequence[str]) -> int:
    """As many as the longest name leaves room for."""
    longest = 34 + _CHAR_WIDTH * max((len(name) for name in names), default=0)
    return max(1, min(3, int((WIDTH - _LEFT) / longest)))


def _path(points: Sequence[tuple[float, float]], style: Style) -> str:
    commands = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for px, py in points[1:]:
        commands.append(f"H{px:.1f}V{py:.1f}" if style == "step" else f"L{px:.1f} {py:.1f}")
    return "".join(commands)


def distribution(title: str, series: Sequence[tuple[str, Sequence[float]]], *, x_label: str) -> str:
    """The share of values at or below each value."""
    curves = []
    for name, values in series:
        ordered = sorted(values)
        points = [(value, (index + 1) / len(ordered)) for index, value in enumerate(ordered)]
        stride = max(1, len(points) // 500)  # more steps than pixels only make the page heavy
        thinned = points[::stride] + ([points[-1]] if points and (len(points) - 1) % stride else [])
        curves.append(Series(name, [(thinned[0][0], 0.0), *thinned] if thinned else [], "step"))
    return line_chart(title, curves, x_label=x_label, y_label="share of all")


def bar_chart(title: str, bars: Sequence[tuple[str, float]], *, x_label: str) -> str:
    """One horizontal bar a name, with its figure."""
    height = _TOP + 26 * len(bars) + _BOTTOM
    left = min(WIDTH / 2, 24 + _CHAR_WIDTH * max((len(name) for name, _ in bars), default=0))
    x = _axis([value for _, value in bars], left, WIDTH - 80, from_zero=True)
    parts = [_open(title, height)]
    for index, (name, value) in enumerate(bars):
        top = _TOP + 26 * index
        width = max(0.0, x.place(value) - x.start)
        parts.append(f'<text x="{left - 6:.1f}" y="{top + 14}" class="tick end">{escape(_shortened(name, left))}</text>')
        parts.append(f'<rect x="{x.start}" y="{top}" width="{width:.1f}" height="19" fill="{COLORS[index % len(COLORS)]}"/>')
        parts.append(f'<text x="{x.start + width + 6:.1f}" y="{top + 14}" class="tick">{_number(value)}</text>')
    parts.append(f'<text x="{(x.start + x.end) / 2}" y="{height - 16}" class="label middle">{escape(x_label)}</text>')
    return "".join([*parts, "</svg>"])


def _shortened(name: str, pixels: float) -> str:
    """The end of a name that is too long goes: better than its beginning, off the picture."""
    most = int((pixels - 12) / _CHAR_WIDTH)
    return name if len(name) <= most else name[: most - 1] + "…"


def timeline(title: str, intervals: Sequence[Interval], *, x_label: str) -> str:
    """One lane a name, boxes where something was going on; the boxes carry their titles."""
    lanes = list(dict.fromkeys(interval.lane for interval in intervals))
    height = _TOP + 34 * len(lanes) + _BOTTOM
    times = [time for interval in intervals for time in (interval.start, interval.end)]
    x = _axis(times, _LEFT + 20, WIDTH - _RIGHT, from_zero=False)
    y = _Axis(0, 1, height - _BOTTOM, _TOP)
    parts = [_open(title, height)]
    for tick in x.ticks():
        parts.append(f'<line x1="{x.place(tick):.1f}" x2="{x.place(tick):.1f}" y1="{y.start}" y2="{y.end}" class="grid"/>')
        parts.append(f'<text x="{x.place(tick):.1f}" y="{y.start + 17}" class="tick middle">{_number(tick)}</text>')
    for index, lane in enumerate(lanes):
        parts.append(f'<text x="{x.start - 6}" y="{_TOP + 34 * index + 20}" class="tick end">{escape(lane)}</text>')
    for interval in intervals:
        left, right = x.place(interval.start), x.place(interval.end)
        top = _TOP + 34 * lanes.index(interval.lane) + 4
        color = COLORS[interval.color % len(COLORS)]
        parts.append(f'<rect x="{left:.2f}" y="{top}" width="{max(0.6, right - left):.2f}" height="24" fill="{color}" opacity="0.85">')
        parts.append(f"<title>{escape(interval.title)}</title></rect>")
    parts.append(f'<text x="{(x.start + x.end) / 2}" y="{height - 12}" class="label middle">{escape(x_label)}</text>')
    return "".join([*parts, "</svg>"])


def standalone(chart: str) -> str:
    """A chart as a file of its own, with the rules that a page would give it; readable on light and dark paper."""
    style = (
        "<style>svg{background:#fff} text{fill:#1b1b1b;font-family:sans-serif} .title{font-size:14px;font-weight:600;text-anchor:middle}"
        ".tick{font-size:11px} .label{font-size:12px} .end{text-anchor:end} .middle{text-anchor:middle}"
        ".grid{stroke:#d8d8d8} .axis{stroke:#1b1b1b}</style>"
    )
    head, _, rest = chart.partition(">")
    return f"{head}>{style}{rest}\n"
