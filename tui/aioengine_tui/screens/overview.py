"""Screen 1: the engine at a glance, with short histories."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from aioengine_tui.model.metrics import HISTORY_LENGTH
from aioengine_tui.model.state import DashboardState, Gauges, Series
from aioengine_tui.screens.base import View
from aioengine_tui.session import Session
from aioengine_tui.table_file import ExportTable
from aioengine_tui.themes import Palette
from aioengine_tui.widgets.graph import bar, graph_lines
from aioengine_tui.widgets.step_rows import STOP_WORDS, budget_bar, kind_tokens, step_header, step_line
from aioengine_tui.widgets.text import Line, Part, fit_line, number, percent, rule, seconds, side_by_side
from aioengine_tui.widgets.why_lines import Advisor, advice_lines

_FIVE_COLUMNS = 154  # cells: the widest heading and value side by side, five times
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
    top: float | None = None  # the value of a full column; None: the largest shown
    role: str = "graph"
    added: Series | None = None  # drawn on top of `series`


def panels(gauges: Gauges) -> list[Panel]:
    def latency(p50: float | None, p95: float | None) -> str:
        return f"{seconds(p50)}/{seconds(p95)}"

    return [
        Panel("steps/s", number(gauges.steps_per_s, 6).strip(), "steps"),
        Panel("KV blocks in use", percent(gauges.kv_cache_usage), "kv_usage", 1.0, "block_used"),
        Panel("decode tokens/s", number(gauges.decode_tokens_per_s, 6).strip(), "decode_tokens", role="decode"),
        Panel("prefill tokens/s", number(gauges.prefill_tokens_per_s, 6).strip(), "prefill_tokens", role="prefill"),
        Panel("running", str(gauges.num_running), "running", role="running"),
        Panel("waiting + preempted", f"{gauges.num_waiting} + {gauges.num_preempted}", "waiting", role="warn", added="preempted"),
        Panel("TTFT p50/95", latency(gauges.ttft_p50, gauges.ttft_p95), "ttft", role="chunk"),
        Panel("ITL p50/95", latency(gauges.itl_p50, gauges.itl_p95), "itl", role="chunk"),
        Panel("prefix cache hits", percent(gauges.prefix_hit_rate), "hit_rate", 1.0, "good"),
        Panel("host work hidden", percent(gauges.overlap_efficiency), "overlap", 1.0, "good"),
    ]


def overview_lines(state: DashboardState, width: int, height: int, *, advisor: Advisor | None = None) -> list[Line]:
    gauges = state.gauges()
    facts = _facts(state, gauges, width)
    footer = _step_lines(state, width) if height >= 16 else []
    footer += advice_lines(advisor or Advisor(), state, width, num_lines=2 if height >= _TWO_LINES_OF_ADVICE else 1)
    columns = 5 if width >= _FIVE_COLUMNS else 2  # of ten panels: no row is left half empty
    shown = panels(gauges)
    room = height - len(facts) - len(footer)
    rows = -(-len(shown) // columns)
    graph_height = min(10, max(1, room // rows - 1))
    while rows * (1 + graph_height) > room and rows > 1:  # very low: the last panels go
        rows -= 1
    widths = [(width - (columns - 1)) // columns] * columns
    widths[-1] = width - (columns - 1) - sum(widths[:-1])
    lines = facts
    for row in range(rows):
        group = shown[row * columns : (row + 1) * columns]
        lines += side_by_side(
            [_panel_lines(state, panel, widths[index], graph_height) for index, panel in enumerate(group)], widths[: len(group)]
        )
    lines += footer
    left = height - len(lines)
    if left >= 4:
        lines += [rule(f"last {min(left - 2, len(state.steps))} steps", width), step_header(width)]
        lines += [step_line(step, width) for step in list(state.steps)[-(left - 2) :]]
    return lines[:height]


def _panel_lines(state: DashboardState, panel: Panel, width: int, height: int) -> list[Line]:
    # What is not known to be so now is marked, in one colour too.
    value = "-" if state.stats is None else f"~{panel.value} stale" if state.is_stale else panel.value
    length = min(width, HISTORY_LENGTH)
    history = state.history(panel.series, length)
    if panel.added is not None:
        more = state.history(panel.added, length)
        history = [a if b is None else b if a is None else a + b for a, b in zip(history, more, strict=True)]
    return [rule(panel.title, width, value), *graph_lines(history, width=width, height=height, top=panel.top, role=panel.role)]


def _facts(state: DashboardState, gauges: Gauges, width: int) -> list[Line]:
    settings: Line = [Part(state.model or "?", "value"), Part("  up ", "muted"), Part(seconds(gauges.uptime), "value")]
    for section, name, label in _SETTINGS:
        value = state.config(section, name)
        if value is not None:
            settings += [Part(f"  {label} ", "muted"), Part(str(value))]
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
    requests: Line = []
    for label, value, role in counts:
        if label == "ended" and totals.origin == "since_attach":
            requests.append(Part("  since attach:", "warn"))
        requests += [Part(f"  {label} " if requests else f"{label} ", "muted"), Part(str(value), role if value else "muted")]
    if gauges.acceptance_rate is not None:
        requests += [Part("  draft tokens accepted ", "muted"), Part(percent(gauges.acceptance_rate), "good")]
        requests.append(Part(f" of {gauges.num_draft_tokens}", "muted"))
    used, total = gauges.num_used_blocks, max(1, gauges.num_total_blocks)
    shared = min(gauges.num_shared_blocks, used)
    cached = min(state.blocks.num_free_cached, total - used)
    text = f" {used} of {gauges.num_total_blocks} used, {shared} shared, {total - used} free ({cached} cached)"
    blocks: Line = [
        Part("KV ", "muted"),
        *bar(
            [
                (shared / total, "▓", "block_shared"),
                ((used - shared) / total, "█", "block_used"),
                (cached / total, "░", "block_free_cached"),
            ],
            width=max(8, width - len(text) - 4),
        ),
        Part(text, "muted"),
    ]
    return [fit_line(line, width) for line in (settings, requests, blocks)]


def _step_lines(state: DashboardState, width: int) -> list[Line]:
    step = state.current
    if step is None:
        return [[Part("no step yet", "muted")]]
    tokens = kind_tokens(step)
    parts = "  ".join(f"{kind} {count}" for kind, count in tokens.items() if count) or "clean-up only"
    stop = STOP_WORDS.get(step.admission_stop, step.admission_stop)
    head = f"step {step.step_id}  {step.num_tokens}/{step.token_budget} tokens "
    line: Line = [Part(head, "muted"), *budget_bar(step, max(6, min(40, width // 4))), Part(f" {parts}")]
    why: Line = [
        Part(f"{state.num_in_flight} in flight, admission stopped by ", "muted"),
        Part(f"{step.admission_stop}: {stop}", "muted" if step.admission_stop == "queue_empty" else "warn"),
    ]
    return [fit_line(line, width), fit_line(why, width)]


class OverviewView(View):
    screen_title: ClassVar[str] = "Overview"

    def __init__(self, palette: Palette, session: Session, *, id: str) -> None:
        super().__init__(palette, session, id=id)
        self.advisor = Advisor()

    def compose_lines(self, state: DashboardState, width: int, height: int) -> list[Line]:
        return overview_lines(state, width, height, advisor=self.advisor)

    def export_table(self, state: DashboardState) -> ExportTable:
        gauges = state.gauges()
        names = [name for name in Gauges.__slots__ if name != "now"]
        return ExportTable(["gauge", "value"], [[name, getattr(gauges, name)] for name in names])
