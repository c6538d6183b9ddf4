"""A whole recording as data: every step in columns, every request as the pieces of its life.

Its size grows with the steps (some 200 bytes each) and with the changes in the lives of requests, not with their product:
a request that decodes for a thousand steps is one piece.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aioengine.core.scheduler_output import AdmissionStop
from aioengine.events.wire import WireHeader
from aioengine_tui.model.metrics import quantiles_of
from aioengine_tui.model.rows import Span

LatencyName = Literal["ttft", "itl", "queue_wait", "e2e"]

PieceKind = Literal["waiting", "preempted", "prefill", "chunk", "decode", "resumed", "idle"]
"""waiting: has never been scheduled. preempted: gave its blocks back and waits again. prefill, chunk, decode, resumed: what its
tokens in a step are (see `ShareKind`). idle: runs, but these steps gave it nothing."""


@dataclass(slots=True)
class Piece:
    """Steps on end in which one kind of thing happened to a request."""

    kind: PieceKind
    first_step: int
    last_step: int
    start: float  # seconds of the engine's clock
    end: float
    # Of each step, where it is not one token a step all along; empty: one a step (decode) or none (waiting, preempted, idle).
    tokens: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def is_scheduled(self) -> bool:
        return self.kind not in ("waiting", "preempted", "idle")

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens) if self.tokens else self.num_steps if self.is_scheduled else 0


@dataclass(slots=True)
class RunRequest:
    """One request of a run. Times are seconds of the engine's clock; None: it was not seen."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    priority: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None  # first
    first_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: str | None = None
    slowest_gap: float = 0.0  # seconds between two tokens
    slowest_gap_step: int = 0  # whose result ended that gap
    prompt: str | None = None  # only where text is recorded
    text: str | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def queue_wait(self) -> float | None:
        return None if self.scheduled_time is None else max(0.0, self.scheduled_time - self.arrival_time)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e(self) -> float | None:
        """From arrival to the end of a request that was not aborted."""
        if self.finish_time is None or self.finish_reason in (None, "abort", "error"):
            return None
        return self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class RunAdvice:
    """What the advisor says of a part of the run."""

    first_step: int
    last_step: int
    share: float  # of 1: how much it weighs
    cause: str
    words: str


class RunSteps:
    """The steps in columns, a value a step in each. A time is NaN where it is not known."""

    INTEGERS = (
        "step_id", "stop", "num_tokens", "token_budget", "num_requests", "num_running", "num_waiting", "num_preempted",
        "num_used_blocks", "num_cached_blocks", "num_prompt_tokens", "num_recomputed_tokens", "num_new_tokens",
        "num_allocated", "num_freed", "num_evicted", "num_preempting", "num_draft_tokens", "num_accepted_tokens",
    )  # fmt: skip
    """`stop`: an index into `ADMISSION_STOPS`. num_preempting: requests that this step preempts; num_preempted: those that wait."""
    TIMES = (
        "schedule_start", "schedule_end", "execute_start", "execute_end", "sample_start", "sample_end", "update_start", "update_end",
    )  # fmt: skip

    def __init__(self) -> None:
        self.columns: dict[str, array[Any]] = {name: array("q") for name in self.INTEGERS}
        self.columns |= {name: array("d") for name in self.TIMES}

    def __len__(self) -> int:
        return len(self.columns["step_id"])

    def __getitem__(self, name: str) -> array[Any]:
        return self.columns[name]

    def span(self, lane: str, index: int) -> Span | None:
        """When a phase (schedule, execute, sample, update) of a step ran; None if that is not known."""
        start, end = self.columns[f"{lane}_start"][index], self.columns[f"{lane}_end"][index]
        return None if start != start or end != end else (start, end)


ADMISSION_STOPS: tuple[AdmissionStop, ...] = ("queue_empty", "budget", "max_num_seqs", "no_blocks", "preempted", "in_flight")


class Samples:
    """Weighted samples without a limit."""

    def __init__(self) -> None:
        self._values, self._weights = array("d"), array("q")

    def add(self, value: float, weight: int = 1) -> None:
        self._values.append(value)
        self._weights.append(weight)

    def __len__(self) -> int:
        return sum(self._weights)

    def items(self) -> Iterator[tuple[float, int]]:
        """(value, weight), as they came."""
        return zip(self._values, self._weights, strict=True)

    def quantiles(self, *shares: float) -> list[float | None]:
        """The values at or below which those shares (0..1) of the samples lie; None without a sample."""
        return quantiles_of(self.items(), *shares)

    @property
    def mean(self) -> float | None:
        total = len(self)
        return sum(value * weight for value, weight in self.items()) / total if total else None


@dataclass(slots=True)
class RunLog:
    """What `read_run` makes of a recording."""

    header: WireHeader
    steps: RunSteps = field(default_factory=RunSteps)
    requests: list[RunRequest] = field(default_factory=list)  # by arrival
    itls: Samples = field(default_factory=Samples)  # seconds between two tokens of a request
    advice: list[RunAdvice] = field(default_factory=list)  # the heaviest finding of each cause, the heaviest first
    num_events: int = 0
    start: float = 0.0  # the engine's clock at the first event
    end: float = 0.0  # at the last one
    num_total_blocks: int = 0
    num_gaps: int = 0  # places where events are missing

    @property
    def duration(self) -> float:
        return max(0.0, self.end - self.start)

    def latency(self, name: LatencyName) -> Samples:
        """All samples of a latency, in seconds."""
        if name == "itl":
            return self.itls
        samples = Samples()
        for value in values_of(self.requests, name):
            samples.add(value)
        return samples


def values_of(requests: Sequence[RunRequest], name: str) -> Iterator[float]:
    """That property of the requests that have it."""
    return (value for request in requests if (value := getattr(request, name)) is not None)
