"""The state as plain text, for `aioengine top` where the output is no terminal."""

from __future__ import annotations

import textwrap

from aioengine.printable import printable
from aioengine_tui.model.state import DashboardState, RequestRow
from aioengine_tui.model.why.words import advice_line

_GLYPHS = {"waiting": "w", "running": "r", "preempted": "p", "cleaning_up": "c", "finished": "f"}


def render_plain(state: DashboardState, *, width: int = 80, max_requests: int = 20) -> str:
    """Lines of at most `width` characters, without control sequences; a line that was cut ends in "…"."""
    lines = [printable(line) for line in (*_summary(state), *_advice(state, width), "", *_step(state), "", *_requests(state, max_requests))]
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines) + "\n"


def _summary(state: DashboardState) -> list[str]:
    gauges = state.gauges()
    marks = [name for name, on in (("engine paused", gauges.paused), ("stale", gauges.stale)) if on]
    head = f"{state.model or 'no engine yet'}  up {_seconds(gauges.uptime)}  {state.status.state}"
    gaps = state.gap_words()
    dropped = f"  {gaps}" if gaps is not None else ""
    return [
        head + (f"  [{', '.join(marks)}]" if marks else "") + dropped,
        f"steps/s {gauges.steps_per_s:.1f}  prefill tok/s {gauges.prefill_tokens_per_s:.0f}  decode tok/s {gauges.decode_tokens_per_s:.0f}"
        f"  overlap {_percent(gauges.overlap_efficiency)}",
        f"running {gauges.num_running}  waiting {gauges.num_waiting}  preempted {gauges.num_preempted}  "
        f"cleaning up {gauges.num_cleaning_up}",
        f"KV {_percent(gauges.kv_cache_usage)} ({gauges.num_used_blocks} of {gauges.num_total_blocks} blocks, "
        f"{gauges.num_shared_blocks} shared; {gauges.num_free_blocks} free, {gauges.num_free_cached_blocks} of these cached)  "
        f"prefix hits {_percent(gauges.prefix_hit_rate)}",
        f"TTFT p50 {_seconds(gauges.ttft_p50)} p95 {_seconds(gauges.ttft_p95)}  ITL p50 {_seconds(gauges.itl_p50)} "
        f"p95 {_seconds(gauges.itl_p95)}",
    ]


def _advice(state: DashboardState, width: int) -> list[str]:
    words = advice_line(state)
    return [] if words is None else textwrap.wrap(f"advice: {words}", width)


def _step(state: DashboardState) -> list[str]:
    record = state.current
    if record is None:
        return ["no step yet"]
    names = (
        ("new", record.new_ids),
        ("resumed", record.resumed_ids),
        ("preempted", record.preempted_ids),
        ("finished", record.finished_ids),
    )
    return [
        f"step {record.step_id}: {record.num_tokens} of {record.token_budget} tokens for {len(record.shares)} requests; "
        f"admission stopped: {record.admission_stop}",
        *(f"  {name}: {' '.join(ids)}" for name, ids in names if ids),
    ]


def _requests(state: DashboardState, max_requests: int) -> list[str]:
    lines = ["  request              prompt cached  comp   out step blocks    age    ttft"]
    rows = list(state.rows())
    lines += [_request(row, state) for row in rows[:max_requests]]
    if len(rows) > max_requests:
        lines.append(f"  and {len(rows) - max_requests} more")
    return lines


def _request(row: RequestRow, state: DashboardState) -> str:
    share = state.share_of(row)
    name = row.request_id if len(row.request_id) <= 20 else row.request_id[:19] + "…"
    return (
        f"{_GLYPHS[row.state]} {name:<20} {row.num_prompt_tokens:>6} {row.num_cached_tokens:>6} {row.num_computed_tokens:>5} "
        f"{row.num_output_tokens:>5} {share[0] if share else '':>4} {row.num_blocks:>6} {_seconds(row.age(state.now)):>6} "
        f"{_seconds(row.ttft):>7}  {row.finish_reason or ''}"
    ).rstrip()


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.0f}ms" if value < 1 else f"{value:.1f}s" if value < 100 else f"{value / 60:.0f}min"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
