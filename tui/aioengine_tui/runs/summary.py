"""The figures by which a run is judged, and by which two are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from aioengine_tui.runs.run_log import ADMISSION_STOPS, LatencyName, RunLog

LATENCIES: tuple[tuple[LatencyName, str], ...] = (
    ("ttft", "first token (TTFT)"),
    ("itl", "between tokens (ITL)"),
    ("queue_wait", "wait in the queue"),
    ("e2e", "whole request (E2E)"),
)

Better = Literal["more", "less", "neither"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run."""

    name: str  # for programs
    label: str  # for people
    value: float | None  # None: nothing was measured
    unit: str = ""
    digits: int = 0  # behind the point
    better: Better = "neither"


def summarize(log: RunLog) -> list[Figure]:
    """What happened in all, in the order in which one asks for it."""
    steps, seconds = log.steps, log.duration
    num_output = sum(steps["num_new_tokens"])
    num_prompt, num_recomputed = sum(steps["num_prompt_tokens"]), sum(steps["num_recomputed_tokens"])
    num_cached, num_asked = sum(r.num_cached_tokens for r in log.requests), sum(r.num_prompt_tokens for r in log.requests)
    used, drafts = max(steps["num_used_blocks"], default=0), sum(steps["num_draft_tokens"])
    return [
        Figure("duration", "duration", seconds, "s", 1),
        Figure("num_steps", "steps", len(steps)),
        Figure("num_requests", "requests", len(log.requests)),
        Figure("num_aborted", "aborted", sum(r.finish_reason == "abort" for r in log.requests), better="less"),
        Figure("output_throughput", "output tokens/s", num_output / seconds if seconds else None, digits=1, better="more"),
        Figure("prompt_throughput", "prompt tokens/s", num_prompt / seconds if seconds else None, digits=1, better="more"),
        Figure("num_output_tokens", "output tokens", num_output),
        Figure("num_prompt_tokens_computed", "prompt tokens computed", num_prompt),
        Figure("num_preemptions", "preemptions", sum(steps["num_preempting"]), better="less"),
        Figure("num_recomputed_tokens", "tokens computed again", num_recomputed, better="less"),
        Figure("prefix_hit_rate", "prompt from the cache", 100 * num_cached / num_asked if num_asked else None, "%", 1, "more"),
        Figure("kv_usage_peak", "KV blocks used at most", 100 * used / log.num_total_blocks if log.num_total_blocks else None, "%", 1),
        Figure("num_evicted", "blocks evicted", sum(steps["num_evicted"]), better="less"),
        Figure("acceptance_rate", "guesses right", 100 * sum(steps["num_accepted_tokens"]) / drafts if drafts else None, "%", 1, "more"),
        *_stop_shares(log),
    ]


def _stop_shares(log: RunLog) -> Iterator[Figure]:
    """Of the steps: how many could have admitted somebody and did not."""
    stops = log.steps["stop"]
    for name in ("budget", "max_num_seqs", "no_blocks", "preempted"):
        share = 100 * stops.count(ADMISSION_STOPS.index(name)) / len(stops) if len(stops) else None
        yield Figure(f"stopped_by_{name}", f"steps stopped by {name}", share, "%", 1, "less")


def latency_figures(log: RunLog) -> list[Figure]:
    """p50, p95 and p99 of each latency, in milliseconds."""
    figures = []
    for name, label in LATENCIES:
        for share, value in zip((50, 95, 99), log.latency(name).quantiles(0.5, 0.95, 0.99), strict=True):
            figures.append(Figure(f"{name}_p{share}", f"{label} p{share}", None if value is None else value * 1e3, "ms", 1, "less"))
    return figures
