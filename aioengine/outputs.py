"""What flows back: from the worker to the scheduler, from there to the output processor, and to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position; rank 1 is the most likely token.

    decoded_token, token_bytes: the token's text by itself, and the bytes that it stands for: those of a piece of a character are
    no text, and show as U+FFFD. None where the engine has no tokenizer, with `detokenize=False`, or, the bytes alone, where the
    tokenizer does not tell.
    """

    logprob: float
    rank: int
    # Functions of the token, filled in by the engine before anybody sees the entry.
    decoded_token: str | None = field(default=None, compare=False)
    token_bytes: bytes | None = field(default=None, compare=False)


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

    A request whose chunk did not reach the end of its known tokens has an empty list, and one that failed too. The others have
    one token, or where draft tokens were checked, those that were accepted and one more.
    """

    req_ids: list[str]  # [num_reqs]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]  # [num_reqs][num_sampled]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # one entry a sampled token; only where asked for
    timing: WorkerTiming | None = None
    # Of the chunk that this step computed, one entry a prompt position from the second on; only where asked for.
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    # Requests that cannot be sampled for (logits that are NaN, no token allowed), and why: they end with an error, no other does.
    failed_req_ids: dict[str, str] = field(default_factory=dict)
    pooler_output: dict[str, list[float]] = field(default_factory=dict)  # the embedding of requests whose prompt this step completed


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
    num_draft_tokens: int = 0  # draft tokens that this step checked for it
    num_accepted_tokens: int = 0  # those of them that were right
    pooling_output: list[float] | None = None  # with finish_reason "stop": the embedding that was asked for


# ------------------------------------------------------------------ engine -> user
@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter()`; None: not yet.

    num_draft_tokens, num_accepted_tokens: the draft tokens that were checked for it and those that were accepted,
    of all its continuations together.

    Why it was slow, of the first continuation: scheduled_time, when it was given its first tokens. waits: the seconds in the
    queue by reason, which add up to `queue_s`: "prepare" (text was tokenised, a grammar compiled), "step" (for the steps
    under way), "budget", "seqs" and "blocks" (the step had no tokens, the engine no places or KV blocks left), "preempted" and
    "in_flight" (others had to give way or were about to come back). preemptions: from when to when it stood preempted.
    """

    queued_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    scheduled_time: float | None = None
    waits: dict[str, float] = field(default_factory=dict, hash=False)
    preemptions: tuple[tuple[float, float], ...] = ()

    @property
    def num_preemptions(self) -> int:
        return len(self.preemptions)

    @property
    def preempted_s(self) -> float:
        return sum(end - start for start, end in self.preemptions)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_time is None else self.scheduled_time - self.queued_time

    @property
    def prefill_s(self) -> float | None:
        """From the first tokens that were computed to the first that was sampled."""
        if self.scheduled_time is None or self.first_token_time is None:
            return None
        return self.first_token_time - self.scheduled_time

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        if self.first_token_time is None or self.finished_time is None:
            return None
        return self.finished_time - self.first_token_time

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.queued_time

    @property
    def acceptance_rate(self) -> float | None:
        """The share of draft tokens that were accepted; None before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


class CompletionHistory:
    """What one continuation has produced. It is only ever appended to, so an output can be a length instead of a copy.

    Copying everything so far for every output would make a stream of n tokens cost n^2.
    """

    __slots__ = ("_joined", "logprobs", "pieces", "token_ids")

    def __init__(self, *, with_logprobs: bool) -> None:
        self.pieces: list[str] = []  # add up to the text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        self._joined = (0, "")  # a number of pieces and their text; replaced as a whole, as outputs may be read in any thread

    def text(self, num_pieces: int) -> str:
        """The text of the first pieces; costs what has been added since it was last asked for, and one copy."""
        num_joined, text = self._joined
        if num_pieces < num_joined:
            return "".join(self.pieces[:num_pieces])
        if num_pieces > num_joined:
            text += "".join(self.pieces[num_joined:num_pieces])
            self._joined = (num_pieces, text)
        return text


class _Excerpt(NamedTuple):
    """The beginning of a history that an output stands for."""

    history: CompletionHistory
    num_pieces: int
    num_tokens: int

    def read(self, name: str) -> object:
        if name == "text":
            return self.history.text(self.num_pieces)
        if name == "token_ids":
            return self.history.token_ids[: self.num_tokens]
        logprobs = self.history.logprobs
        return None if logprobs is None else logprobs[: self.num_tokens]


class _MadeOnDemand:
    __slots__ = ("_excerpt",)  # not a field: it is no part of what an output says


@dataclass(frozen=True, slots=True)
class CompletionOutput(_MadeOnDemand):
    """One continuation of the prompt. It never changes: what comes later is in later outputs.

    With RequestOutputKind.DELTA `text`, `token_ids` and `logprobs` are what came since the output before (all of them
    add up to the final output of the other kinds), else everything so far. `text_delta` is what came since the last
    output that the consumer received, whatever the kind.

    A token id, and its entry of `logprobs`, come in the output with the last character of their text: later than they
    were sampled if bytes of a character are missing, or if the text may turn out to be the beginning of a stop string.
    What is held back comes with the end of the request.

    error: with finish_reason "error" what went wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    text_delta: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @classmethod
    def from_history(
        cls,
        index: int,
        history: CompletionHistory,
        text_delta: str,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        error: str | None,
    ) -> CompletionOutput:
        """Everything that is in `history` now; `text`, `token_ids` and `logprobs` are made when they are first read."""
        output = object.__new__(cls)
        _set(output, "_excerpt", _Excerpt(history, len(history.pieces), len(history.token_ids)))
        _set(output, "index", index)
        _set(output, "text_delta", text_delta)
        _set(output, "finish_reason", finish_reason)
        _set(output, "stop_reason", stop_reason)
        _set(output, "error", error)
        return output

    if not TYPE_CHECKING:  # a type checker would take any attribute for granted

        def __getattr__(self, name):
            # Python asks here for slots that were not filled.
            if name not in ("text", "token_ids", "logprobs"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self._excerpt.read(name)
            _set(self, name, value)
            return value

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


_set = object.__setattr__  # what a frozen dataclass itself uses to fill its fields


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request, handed to the user each time something new has arrived.

    `text`, `token_ids` and the like are those of the first continuation; with n > 1 see `outputs`.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # n of them, by index, also those that have nothing new
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt: str | None = None  # the text that was tokenised, if the prompt was given as text or messages
    # One entry a prompt token; the first is None, as nothing comes before it. None unless asked for and complete.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return None not in [output.finish_reason for output in self.outputs]  # quicker than all(), and it is asked often

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


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """What `AsyncEngine.embed` gives for one prompt."""

    embedding: list[float]  # [hidden_size]
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
