"""What stands in the way of more speed, and the setting to change: from the steps that are kept, without a clock of its own."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import PROMPTS, StepMark
from aioengine_tui.model.why.slow import SLOW_FACTOR, prompt_tokens, usual_duration
from aioengine_tui.model.why.waiting import setting as setting_of

ADVICE_STEPS = 2000
"""Advice is about the latest so many steps."""

Cause = Literal["budget", "max_num_seqs", "no_blocks", "long_prompts"]
"""What keeps requests waiting or tokens late: the token budget, the slots, the KV blocks (too few, and preemptions for want of
them), prompts that share a step with decoding requests."""

_LEAST_SHARE = 0.05  # of steps, or of the time: less is not worth a change
_LEAST_STEPS = 8
_MOST_RAISED = 8  # times the present value: a proposal beyond that is no guess any more
_LOOKED_AT = 8  # slow steps whose shares are looked at one by one
_CAUSE_OF_STOP: dict[str, Cause] = {"budget": "budget", "max_num_seqs": "max_num_seqs", "no_blocks": "no_blocks", "preempted": "no_blocks"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, how much it weighs, and what to do about it."""

    cause: Cause
    share: float  # of 1: of the steps it stopped, or (long_prompts) of the time, that in which decoding requests were held up
    num_steps: int  # that it stopped, or made slow
    setting: str  # the setting to change, as the engine and its command line name it
    present: int | None  # its value; None: not told
    proposed: int | None  # a value to try
    otherwise: str  # another way out, in words; empty: none


@dataclass(frozen=True, slots=True)
class Advice:
    """Of the latest steps: what was seen, and the findings, the heaviest first; none: nothing stands in the way."""

    num_steps: int
    stops: dict[str, int]  # steps by why they admitted no further request
    num_preemptions: int
    num_prompt_tokens: int  # computed, without the next ones
    num_recomputed_tokens: int
    findings: tuple[Finding, ...]


def advise(state: DashboardState, *, num_steps: int = ADVICE_STEPS) -> Advice | None:
    """None before the first steps: nothing can be said of fewer than a handful."""
    marks = state.waterfall.marks
    recent = itertools.islice(marks, max(0, len(marks) - num_steps), None)
    working = [mark for mark in recent if mark.num_tokens]  # steps that only tell the worker whom to forget say nothing
    if len(working) < _LEAST_STEPS:
        return None
    stops: Counter[str] = Counter(mark.stop for mark in working)
    num_prompt = sum(mark.num_prompt_tokens for mark in working)
    num_recomputed = sum(mark.num_recomputed_tokens for mark in working)
    findings = [*_stop_findings(state, stops, working), *_long_prompts(state, working)]
    findings.sort(key=lambda finding: -finding.share)
    return Advice(
        num_steps=len(working),
        stops=dict(stops),
        num_preemptions=sum(mark.num_preempted for mark in working),
        num_prompt_tokens=num_prompt,
        num_recomputed_tokens=num_recomputed,
        findings=tuple(findings),
    )


def _stop_findings(state: DashboardState, stops: Counter[str], working: Sequence[StepMark]) -> list[Finding]:
    by_cause: Counter[Cause] = Counter()
    for stop, count in stops.items():
        if (cause := _CAUSE_OF_STOP.get(stop)) is not None:
            by_cause[cause] += count
    found = []
    for cause, count in by_cause.items():
        share = count / len(working)
        if share >= _LEAST_SHARE:
            setting, present, proposed, otherwise = _remedy(state, cause, working)
            found.append(Finding(cause, share, count, setting, present, proposed, otherwise))
    return found


def _remedy(state: DashboardState, cause: Cause, working: Sequence[StepMark]) -> tuple[str, int | None, int | None, str]:
    """The setting, its value, a value to try, and another way out."""
    max_num_seqs = setting_of(state, "max_num_seqs")
    if cause == "budget":
        present = setting_of(state, "max_num_batched_tokens")
        return "max_num_batched_tokens", present, None if present is None else present * 2, ""
    if cause == "max_num_seqs":
        wanted = max(mark.num_running + mark.num_waiting for mark in working)
        proposed = None if max_num_seqs is None else min(max(wanted, max_num_seqs + 1), max_num_seqs * 2)
        is_full = any(mark.num_used_blocks > 0.9 * mark.num_total_blocks for mark in working)
        return "max_num_seqs", max_num_seqs, proposed, "and num_kv_cache_blocks with it" if is_full else ""
    present = state.stats.num_total_blocks + 1 if state.stats is not None else None  # the null block counts in the setting
    lower = max(1, round(sum(mark.num_running for mark in working) / len(working)) - 1)
    otherwise = f"or lower max_num_seqs ({max_num_seqs}) to {lower}" if max_num_seqs is not None and lower < max_num_seqs else ""
    return "num_kv_cache_blocks", present, None if present is None else _blocks_for_all(present, max_num_seqs, working), otherwise


def _blocks_for_all(present: int, max_num_seqs: int | None, working: Sequence[StepMark]) -> int:
    """The blocks that all would have held that ran or waited, as far as they may run, each as many as those that ran held."""
    wanted = 0.0
    for mark in working:
        if mark.num_running:
            num_reqs = mark.num_running + mark.num_waiting
            wanted = max(wanted, mark.num_used_blocks / mark.num_running * min(num_reqs, max_num_seqs or num_reqs))
    return max(present + 1, min(round(wanted) + 1, present * _MOST_RAISED))


def _long_prompts(state: DashboardState, working: Sequence[StepMark]) -> list[Finding]:
    """Steps in which requests decode beside prompt tokens, and which took far longer than decoding alone does.

    What counts is the time beyond SLOW_FACTOR times the usual: prompts have to be computed some time, but not all at once.
    """
    usual = usual_duration(state.waterfall)
    if not usual:
        return []
    beside = [mark for mark in working if prompt_tokens(mark) and mark.num_tokens > prompt_tokens(mark)]
    slow = [mark for mark in beside if (mark.duration or 0.0) >= SLOW_FACTOR * usual]
    lost = sum((mark.duration or 0.0) - SLOW_FACTOR * usual for mark in slow)
    whole = sum(mark.duration or 0.0 for mark in working)
    share = lost / whole if whole > 0 else 0.0
    if share < _LEAST_SHARE:
        return []
    setting, present, room = _chunk_setting(state, slow, usual)
    other = "max_num_batched_tokens" if setting == "long_prefill_token_threshold" else "long_prefill_token_threshold"
    value = setting_of(state, other)
    otherwise = f"or lower {other} ({value})" if value else f"or set {other}"
    return [Finding("long_prompts", share, len(slow), setting, present, room, otherwise)]


def _chunk_setting(state: DashboardState, slow: Sequence[StepMark], usual: float) -> tuple[str, int | None, int]:
    """The setting, its value, and one with which a step takes less than SLOW_FACTOR times the usual.

    One long prompt a step: a limit for each request. Many short ones together: only the budget limits them.
    """
    per_token = statistics.median(((mark.duration or 0.0) - usual) / prompt_tokens(mark) for mark in slow)
    room = max(1, int((SLOW_FACTOR - 1) * usual / per_token))
    slowest = sorted(slow, key=lambda mark: -prompt_tokens(mark))[:_LOOKED_AT]
    shares = [[run.num_tokens for _, run in state.waterfall.company(mark.step_id) if run.cell in PROMPTS] for mark in slowest]
    largest = [max(tokens, default=0) for tokens in shares]
    if sum(largest) * 2 >= sum(map(prompt_tokens, slowest)):
        return "long_prefill_token_threshold", setting_of(state, "long_prefill_token_threshold"), room
    num_decodes = max(mark.num_tokens - prompt_tokens(mark) for mark in slowest)
    return "max_num_batched_tokens", setting_of(state, "max_num_batched_tokens"), room + num_decodes
