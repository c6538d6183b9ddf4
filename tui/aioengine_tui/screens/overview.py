"""Screen 1: the engine at a glance, with histories of two minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from aioengine_tui.model.metrics import HISTORY_LENGTH
from aioengine_tui.model.state import DashboardState, Gauges, Series
from aioengine_tui.screens.base import View
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.graph import bar, graph_lines
from aioengine_tui.widgets.step_rows import STOP_WORDS, budget_bar, kind_tokens, step_header, step_line, step_rows
from aioengine_tui.widgets.text import (
    Hot,
    Line,
    Part,
    clean,
    fit,
    fit_line,
    line_text,
    number,
    pack,
    percent,
    rule,
    seconds,
    side_by_side,
    width_of,
)
from aioengine_tui.widgets.why_lines import Advisor, advice_lines

_SPAN = ("2m ago", "1m")  # of every graph, however wide
_MAX_PANEL_HEIGHT = 13
_TWO_LINES_OF_ADVICE = 30  # rows
_SETTINGS = (
    ("worker", "device", "device"),
    ("worker", "weights", "weights"),
    ("worker", "kv_cache_dtype", "KV"),
    ("cache", "block_size", "block"),
    ("scheduler", "max_num_seqs", "seqs"),
    ("scheduler", "max_num_batched_tokens", "budget"),
    ("scheduler", "policy", "policy"),
)


class Panel(NamedTuple):
    """One graph of the overview."""

    title: str
    value: str
    series: Series
    form: Callable[[float], str]  # how a number of this kind is written in five cells
    screen: str  # that a click on the title shows
    top: float | None = None  # the end of the scale; None: above the largest value
    role: str = "graph"
    added: Series | None = None  # drawn on top of `series`


def panels(gauges: Gauges, max_running: float | None = None) -> list[Panel]:
    """All of them, the most telling first: a small screen shows the first ones as graphs and the rest as numbers.

    max_running: `max_num_seqs`, the end of the scale of those that run.
    """

    def latency(*values: float | None) -> str:
        return "/".join("-" if value is None else _short_seconds(value) for value in values)

    ttft = latency(gauges.ttft_p50, gauges.ttft_p95, gauges.ttft_p99)
    itl = latency(gauges.itl_p50, gauges.itl_p95, gauges.itl_p99)
    wait = latency(gauges.queue_wait_p50, gauges.queue_wait_p95, gauges.queue_wait_p99)
    waiting = f"{gauges.num_waiting} + {gauges.num_preempted}"
    return [
        Panel("decode tokens/s", _count(gauges.decode_tokens_per_s), "decode_tokens", _count, "batch", role="decode"),
        Panel("KV blocks in use", percent(gauges.kv_cache_usage), "kv_usage", _share, "blocks", 1.0, "block_used"),
        Panel("running", str(gauges.num_running), "running", _count, "batch", max_running, "running"),
        Panel("wait + preempted", waiting, "waiting", _count, "batch", role="warn", added="preempted"),
        Panel("TTFT p50/95/99", ttft, "ttft", _short_seconds, "batch", role="chunk"),
        Panel("ITL p50/95/99", itl, "itl", _short_seconds, "step", role="chunk"),
        Panel("queue wait p50/95/99", wait, "queue_wait", _short_seconds, "batch", role="warn"),
        Panel("prefill tokens/s", _count(gauges.prefill_tokens_per_s), "prefill_tokens", _count, "step", role="prefill"),
        Panel("steps/s", _count(gauges.steps_per_s), "steps", _count, "step"),
        Panel("prefix cache hits", percent(gauges.prefix_hit_rate), "hit_rate", _share, "blocks", 1.0, "good"),
        Panel("host work hidden", percent(gauges.overlap_efficiency), "overlap", _share, "step", 1.0, "good"),
    ]


def _count(value: float) -> str:
    return number(value if value % 1 else int(value), 5).strip() if value % 0.5 or value >= 1000 else f"{value:g}"


def _share(value: float) -> str:
    return f"{value * 100:.0f}%"


def _short_seconds(value: float) -> str:
    """In at most five cells."""
    if value < 0.0095:
        return f"{value * 1e3:.1f}ms" if value >= 0.00095 else f"{value * 1e6:.0f}us"
    return f"{value * 1e3:.0f}ms" if value < 0.9995 else f"{value:.1f}s" if value < 99.5 else f"{value:.0f}s"


def overview_lines(state: DashboardState, width: int, height: int, *, advisor: Advisor | None = None) -> list[Line]:
    gauges = state.gauges()
    facts = _facts(state, gauges, width, max_lines=2 if height >= 18 else 1)
    footer = _step_lines(state, width) if height >= 14 else []
    footer += advice_lines(advisor or Advisor(), state, width, num_lines=2 if height >= _TWO_LINES_OF_ADVICE else 1)
    shown = panels(gauges, state.config("scheduler", "max_num_seqs"))
    columns = 2 if width < 105 else 3 if width < 150 else 4
    room = height - len(facts) - len(footer)
    num_slots = len(shown) + 1  # the last one is the table of latencies
    rows = min(-(-num_slots // columns), max(1, room // 5))
    num_graphs = min(len(shown), rows * columns)
    rest = _rest_lines(state, shown[num_graphs:], width)
    widths = [(width - 2 * (columns - 1)) // columns] * columns
    widths[-1] = width - sum(widths[:-1]) - 2 * (columns - 1)
    lines = [*facts, *rest]
    for row, panel_height in enumerate(_deal_rows(room - len(rest), rows)):
        blocks = [
            _panel_lines(state, shown[index], widths[column], panel_height)
            if index < len(shown)
            else _latency_table(gauges, widths[column], panel_height)
            for column, index in enumerate(range(row * columns, min((row + 1) * columns, num_slots)))
        ]
        lines += side_by_side(blocks, widths[: len(blocks)], gap=2)
    lines += footer
    left = height - len(lines)
    if left >= 4:
        lines += [rule(f"last {min(left - 2, len(state.steps))} steps", width), step_header(width)]
        lines += [step_line(row, width) for row in step_rows(list(state.steps))[-(left - 2) :]]
    return lines[:height]


def _deal_rows(room: int, num_panels: int) -> list[int]:
    """The height of each row of panels: all of the room, up to a height from which on a graph only gets emptier."""
    heights = [max(1, room // num_panels)] * num_panels
    for index in range(room - sum(heights)):
        heights[index % num_panels] += 1
    return [min(_MAX_PANEL_HEIGHT, height) for height in heights]


def _latency_table(gauges: Gauges, width: int, height: int) -> list[Line]:
    """Half of the requests, all but a twentieth, all but a hundredth waited at most so long."""
    rows = (
        ("queue wait", gauges.queue_wait_p50, gauges.queue_wait_p95, gauges.queue_wait_p99),
        ("TTFT", gauges.ttft_p50, gauges.ttft_p95, gauges.ttft_p99),
        ("ITL", gauges.itl_p50, gauges.itl_p95, gauges.itl_p99),
    )
    size = min(9, max(6, (width - 11) // 3))
    lines = [
        rule("latency of the last minute", width),
        [Part(" " * 11 + "".join(name.rjust(size) for name in ("p50", "p95", "p99")), "muted")],
    ]
    for name, *values in rows:
        lines.append([Part(fit(name, 11), "muted"), *(Part(fit(seconds(value), size, right=True), "value") for value in values)])
    return lines[:height]


def _value_of(state: DashboardState, panel: Panel) -> str:
    """What is not known to be so now is marked, in one colour too."""
    return "-" if state.stats is None else f"~{panel.value} stale" if state.is_stale else panel.value


def _panel_lines(state: DashboardState, panel: Panel, width: int, height: int) -> list[Line]:
    history = state.history(panel.series, HISTORY_LENGTH)
    if panel.added is not None:
        more = state.history(panel.added, HISTORY_LENGTH)
        history = [a if b is None else b if a is None else a + b for a, b in zip(history, more, strict=True)]
    known = [value for value in history if value is not None]
    peak = f"peak {panel.form(max(known))}" if known and panel.top != 1.0 else ""
    head = rule(panel.title, width, _value_of(state, panel), note=peak, action=f"app.show('{panel.screen}')")
    if height < 2:
        return [head]
    graph = graph_lines(history, width=width, height=height - 1, top=panel.top, role=panel.role, form=panel.form, span=_SPAN)
    return [head, *graph]


def _rest_lines(state: DashboardState, rest: list[Panel], width: int) -> list[Line]:
    """The numbers of the graphs that there is no room for."""
    if not rest:
        return []
    items: list[Line] = [
        [Hot(f"{panel.title} ", "muted", f"app.show('{panel.screen}')"), Part(_value_of(state, panel), "value")] for panel in rest
    ]
    return pack(items, width)


def _facts(state: DashboardState, gauges: Gauges, width: int, *, max_lines: int) -> list[Line]:
    settings: list[Line] = [[Part(clean(state.model) or "?", "value")], [Part("up ", "muted"), Part(seconds(gauges.uptime), "value")]]
    for section, name, label in _SETTINGS:
        value = state.config(section, name)
        if value is not None:
            settings.append([Part(f"{label} ", "muted"), Part(clean(str(value)))])
    totals = state.totals
    counts: list[tuple[str, int, str]] = [
        ("running", gauges.num_running, "running"),
        ("waiting", gauges.num_waiting, "text"),
        ("preempted", gauges.num_preempted, "preempted"),
        ("cleaning", gauges.num_cleaning_up, "text"),
        ("ended", totals.num_finished, "text"),
        ("aborted", totals.num_aborted, "aborted"),
        ("preempts", totals.num_preemptions, "preempted"),
    ]
    requests: list[Line] = []
    for label, value, role in counts:
        since = [Part("since attach: ", "warn")] if label == "ended" and totals.origin == "since_attach" else []
        requests.append([*since, Part(f"{label} ", "muted"), Part(str(value), role if value else "muted")])
    if gauges.acceptance_rate is not None:
        accepted: Line = [Part("draft tokens accepted ", "muted"), Part(percent(gauges.acceptance_rate), "good")]
        requests.append([*accepted, Part(f" of {gauges.num_draft_tokens}", "muted")])
    return [*pack(settings, width), *pack(requests, width, max_lines=max_lines), _blocks_line(state, gauges, width)]


def _blocks_line(state: DashboardState, gauges: Gauges, width: int) -> Line:
    used, total = gauges.num_used_blocks, max(1, gauges.num_total_blocks)
    shared = min(gauges.num_shared_blocks, used)
    cached = min(state.blocks.num_free_cached, total - used)
    items: list[Line] = [
        [Part(f"{used} of {gauges.num_total_blocks} used", "muted")],
        [Part(f"{shared} shared", "muted")],
        [Part(f"{total - used} free ({cached} cached)", "muted")],
    ]
    (text,) = pack(items, max(10, width - 14), gap=", ")
    filled = bar(
        [
            (shared / total, "▓", "block_shared"),
            ((used - shared) / total, "█", "block_used"),
            (cached / total, "░", "block_free_cached"),
        ],
        width=max(6, width - width_of(line_text(text)) - 5),
    )
    return fit_line([Part("KV ", "muted"), *filled, Part(" "), *text], width)


def _step_lines(state: DashboardState, width: int) -> list[Line]:
    step = state.current
    if step is None:
        return [[Part("no step yet", "muted")]]
    tokens = kind_tokens(step)
    parts = "  ".join(f"{kind} {count}" for kind, count in tokens.items() if count) or "clean-up only"
    stop = STOP_WORDS.get(step.admission_stop, step.admission_stop)
    head = f"step {step.step_id}  {step.num_tokens}/{step.token_budget} tokens "
    size = max(6, min(40, width // 4, width - width_of(head) - width_of(parts) - 1))
    line: Line = [Hot(head, "muted", "app.show('step')"), *budget_bar(step, size), Part(f" {parts}")]
    why: Line = [
        Part(f"{state.num_in_flight} in flight, admission stopped by ", "muted"),
        Part(f"{step.admission_stop}: {stop}", "muted" if step.admission_stop == "queue_empty" else "warn"),
    ]
    return [fit_line(line, width), fit_line(why, width)]


class OverviewView(View):
    screen_title: ClassVar[str] = "Overview"

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.advisor = Advisor(session.hindsight)

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        return overview_lines(state, width, height, advisor=self.advisor)

    def export_table(self, state: DashboardState) -> ExportTable:
        gauges = state.gauges()
        names = [name for name in Gauges.__slots__ if name != "now"]
        return ExportTable(["gauge", "value"], [[name, getattr(gauges, name)] for name in names])
