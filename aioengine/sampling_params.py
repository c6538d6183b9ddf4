"""How to turn logits into tokens, and when to stop. The names and the meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: the division by it would overflow float32 logits."""

MIN_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this, so that scaled logits stay finite."""

MAX_LOGPROBS = 20


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one generation, checked when they are built.

    temperature: 0 is greedy; values under 0.01 are raised to 0.01, as dividing by them overflows.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens whose probabilities add up to at least top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: makes the output a function of prompt, parameters and seed alone, whatever else runs. None: a fresh one.
    max_tokens: at most this many tokens; None: until the model's length, or the KV cache, is full.
    min_tokens: no eos, stop id or stop string before this many tokens.
    stop: strings that end the output; the text is cut before the string unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the output. The id is in `token_ids`, its text is not in `text`.
    ignore_eos: generate on after the model's end-of-sequence tokens.
    skip_special_tokens: leave special tokens out of `text`.
    logprobs: report the log-probability of each sampled token and of the `logprobs` most likely ones (at most 20),
        from the unscaled, unmasked logits. 0 reports the sampled token only; None reports nothing.

    Raises InvalidRequestError naming the parameter, its value and the limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()  # a tuple once built
    stop_token_ids: Sequence[int] = ()  # a tuple once built
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.stop_strings)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_stops()
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)

    def _check_numbers(self) -> None:
        _require(_finite(self.temperature) and self.temperature >= 0, f"temperature must be a finite number >= 0, got {self.temperature!r}")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p!r}")
        _require(_whole(self.top_k) and self.top_k >= -1, f"top_k must be an integer >= -1 (0 and -1 keep all tokens), got {self.top_k!r}")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p!r}")
        _require(
            self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**64),
            f"seed must be an integer in [0, 2**64) or None, got {self.seed!r}",
        )
        _require(
            self.max_tokens is None or (_whole(self.max_tokens) and self.max_tokens >= 1),
            f"max_tokens must be an integer >= 1 or None, got {self.max_tokens!r}",
        )
        _require(_whole(self.min_tokens) and self.min_tokens >= 0, f"min_tokens must be an integer >= 0, got {self.min_tokens!r}")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _require(
                _whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be an integer in [0, {MAX_LOGPROBS}] or None, got {self.logprobs!r}",
            )

    def _check_stops(self) -> None:
        for text in self.stop_strings:
            _require(isinstance(text, str) and text != "", f"stop must hold non-empty strings, got {text!r}")
        for token_id in self.stop_token_ids:
            _require(_whole(token_id) and token_id >= 0, f"stop_token_ids must hold integers >= 0, got {token_id!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is once built, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
