"""What flows back: from the worker to the scheduler, from there to the output processor, and to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position; rank 1 is the most likely token."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]
"""token id -> Logprob at one position. The sampled token comes first, then the most likely ones in order."""


# ------------------------------------------------------------------ worker -> scheduler
@dataclass(frozen=True, slots=True)
class WorkerTiming:
    """When the worker ran a step, in seconds of `time.perf_counter()`."""

    execute_start: float
    execute_end: float
    sample_start: float
    sample_end: float


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The sampled tokens of one step, aligned with `req_ids`.

    A request whose chunk did not reach the end of its known tokens has an empty list.
    """

    req_ids: list[str]  # [num_reqs]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]  # [num_reqs][num_sampled]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # only the requests that asked for them
    timing: WorkerTiming | None = None
    # Of the chunk that this step computed, one entry a prompt position from the second on; only where asked for.
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    # Requests whose logits cannot be sampled from (NaN), and why: they end with an error, the others go on.
    failed_req_ids: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------------------------ scheduler -> output processor
class EngineCoreOutput(NamedTuple):
    """What one step gave one request. A tuple, because one is made for every request in every step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # of this step's chunk
    error: str | None = None  # with finish_reason "error": the cause


# ------------------------------------------------------------------ engine -> user
@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter()`; None: not yet."""

    queued_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.queued_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of the prompt, as far as it has got.

    `text`, `token_ids` and `logprobs` are everything so far; `text_delta` is what came since the last output that the
    consumer received, so the deltas of a stream add up to the final `text`.
    """

    index: int
    text: str
    token_ids: list[int]
    text_delta: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request, handed to the user each time something new has arrived."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt: str | None = None  # the text that was tokenised, if the prompt was given as text or messages
    # One entry a prompt token; the first is None, as nothing comes before it. None unless asked for and complete.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def text_delta(self) -> str:
        return self.outputs[0].text_delta

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason
