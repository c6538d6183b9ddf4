"""Why a token was slow: what shared its step, or kept its request out of the steps before."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Literal

from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.waterfall import CELLS, COMPUTES, PREEMPTED, PROMPTS, Cell, Run, StepMark, Waterfall

SLOW_FACTOR = 2.0
"""A step is called slow from this multiple of the usual time on."""

_USUAL_STEPS = 300  # what is usual is taken from the latest so many steps

SlowCause = Literal["prompt", "preempted", "not_scheduled", "step"]
"""prompt: prompt tokens of others shared the step. preempted: the request lost its blocks, and its tokens were computed again.
not_scheduled: it ran, but got no token in the steps between. step: nothing but the step itself, which took so long."""


@dataclass(frozen=True, slots=True)
class Companion:
    """Who had tokens of a prompt in a step."""

    request_id: str
    cell: Cell  # "prefill", "chunk" or "resumed"
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepCompany:
    """What shared one step."""

    step_id: int
    duration: float | None  # seconds of the worker; None: not back yet, or not told
    usual: float | None  # seconds: the median of the kept steps without prompt tokens; None: there is none
    num_decodes: int
    prompts: tuple[Companion, ...]  # most tokens first

    @property
    def is_slow(self) -> bool:
        return self.duration is not None and self.usual is not None and self.duration >= SLOW_FACTOR * self.usual


@dataclass(frozen=True, slots=True)
class SlowToken:
    """The longest wait between two tokens of a request, as far as the steps are kept."""

    request_id: str
    gap: float  # seconds between the results of its two steps
    usual: float | None  # seconds: the median gap of this request
    cause: SlowCause
    num_steps_without: int  # steps between the two in which it had no token
    company: StepCompany  # of the step that took longest among those it waited for


def usual_duration(waterfall: Waterfall) -> float | None:
    """Seconds: the median duration of the latest steps that computed no prompt; None without one."""
    marks = waterfall.marks
    recent = itertools.islice(marks, max(0, len(marks) - _USUAL_STEPS), None)
    times = [time for mark in recent if mark.num_tokens and not prompt_tokens(mark) and (time := mark.duration) is not None]
    return statistics.median(times) if times else None


def prompt_tokens(mark: StepMark) -> int:
    """Tokens of prompts and of histories that are computed again."""
    return mark.num_prompt_tokens + mark.num_recomputed_tokens


def step_company(state: DashboardState, step_id: int) -> StepCompany | None:
    """None if the step is no longer kept."""
    waterfall = state.waterfall
    mark = waterfall.mark(step_id)
    if mark is None:
        return None
    company = waterfall.company(step_id)
    prompts = [Companion(request_id, CELLS[run.cell], run.num_tokens) for request_id, run in company if run.cell in PROMPTS]
    prompts.sort(key=lambda companion: -companion.num_tokens)
    return StepCompany(step_id, mark.duration, usual_duration(waterfall), len(company) - len(prompts), tuple(prompts))


def slowest_token(state: DashboardState, request_id: str) -> SlowToken | None:
    """None if fewer than two of its tokens are in the steps that are kept."""
    row = state.waterfall.row(request_id)
    if row is None:
        return None
    marks = state.waterfall.marks
    start = (state.waterfall.position(row.first_step) or 0) if row.first_step is not None else 0
    steps = [(mark, run) for mark in itertools.islice(marks, start, None) if (run := row.at(mark.step_id)) is not None]
    tokens = [index for index, (mark, run) in enumerate(steps) if run.cell in COMPUTES and run.samples and mark.result_time is not None]
    gaps = [(_result_time(steps[b][0]) - _result_time(steps[a][0]), a, b) for a, b in itertools.pairwise(tokens)]
    if not gaps:
        return None
    gap, first, last = max(gaps, key=lambda entry: entry[0])
    between = steps[first + 1 : last + 1]
    usual = statistics.median(entry[0] for entry in gaps) if len(gaps) > 1 else None
    longest = max((mark for mark, _ in between), key=lambda mark: mark.duration or 0.0)
    company = step_company(state, longest.step_id)
    assert company is not None, "its mark is kept"
    num_without = sum(run.cell not in COMPUTES for _, run in between)
    return SlowToken(request_id, gap, usual, _slow_cause(request_id, between, company), num_without, company)


def _result_time(mark: StepMark) -> float:
    assert mark.result_time is not None, "only steps that came back"
    return mark.result_time


def _slow_cause(request_id: str, between: list[tuple[StepMark, Run]], company: StepCompany) -> SlowCause:
    if any(run.cell == PREEMPTED for _, run in between):
        return "preempted"
    if any(companion.request_id != request_id for companion in company.prompts) and (company.is_slow or company.usual is None):
        return "prompt"
    return "not_scheduled" if any(run.cell not in COMPUTES for _, run in between) else "step"
