"""How to turn logits into tokens, and when to stop. The names and the meanings are vLLM's."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioengine.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: the division by it would overflow float32 logits."""

MIN_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this, so that scaled logits stay finite."""

MAX_LOGPROBS = 20

MAX_NUM_SEQUENCES = 1024
"""The largest `n`: each continuation is a request of its own to the scheduler."""

MAX_LOGIT_BIAS = 100.0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequestError(message)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    """The items of a list or the like; None: there are none."""
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise InvalidRequestError(f"{name} must be a list, got {value!r}") from None


def _copy(name: str, value: Any) -> dict[Any, Any]:
    """A copy of a mapping; None: an empty one."""
    _require(value is None or isinstance(value, Mapping), f"{name} must be a mapping, got {value!r}")
    return dict(value or {})


class RequestOutputKind(enum.Enum):
    """What each output of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what came since the output before: text, token ids and logprobs that belong together
    FINAL_ONLY = 2  # one output, when the request has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of the output has to match: exactly one of the first five fields.

    json: a JSON schema, as a dict or as its text. Numbers in it that a double does not hold exactly are refused (integers
        beyond 2**53, decimals of more than 15 digits), negated classes in its patterns never match NUL, and control characters
        beside \\b, \\f, \\n, \\r and \\t are written only for a schema that has some itself.
    regex: the whole output matches it; the syntax is that of Rust's regex crate (no look-around, no back references), and
        \\d is [0-9]. choice: one of these strings.
    grammar: a context-free grammar in Lark's notation. json_object: any JSON object.
    disable_any_whitespace: JSON without white space between its tokens. Otherwise there are up to 16 white-space characters
        in each place, unless "whitespace_pattern" in the schema's "x-guidance" says something else.

    Text in a grammar is text, also where it spells a special token; in Lark's notation <|name|> is the token itself.
    What takes more than 10 s to compile is refused.

    Raises InvalidRequestError unless exactly one is given.
    """

    json: str | Mapping[str, Any] | None = field(default=None, hash=False)
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        _require(
            len(given) == 1,
            f"structured_outputs needs exactly one of json, regex, choice, grammar and json_object, got {', '.join(given) or 'none'}",
        )
        if self.choice is not None:
            _require(not isinstance(self.choice, str), f"structured_outputs.choice must be a list of strings, got {self.choice!r}")
            object.__setattr__(self, "choice", tuple(self.choice))
            _require(
                bool(self.choice) and all(isinstance(text, str) and text for text in self.choice),
                f"structured_outputs.choice must hold non-empty strings, got {self.choice!r}",
            )
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            _require(text is None or (isinstance(text, str) and text != ""), f"structured_outputs.{name} must be a non-empty string")


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
    logprobs: report the log-probability of each sampled token and of the `logprobs` most likely ones (at most 20); the
        engine's `logprobs_mode` says from which logits. 0 reports the sampled token only; None reports nothing.
    prompt_logprobs: the same for the tokens of the prompt, each given those before it.
    n: how many continuations, each with its own index and a seed derived from `seed`; they share the prompt's KV blocks.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that the output holds: once, and once for
        each time; in [-2, 2].
    repetition_penalty: logits of tokens that prompt or output hold are divided by it if positive, else multiplied; in (0, 2].
    logit_bias: token id -> what is added to its logit, in [-100, 100].
    allowed_token_ids: nothing else is sampled. bad_words: texts that are never generated, also after a space.
    bad_words_token_ids: `bad_words` in tokens; filled in by the engine.
    spaces_between_special_tokens: a space between adjacent special tokens when they are not skipped.
    detokenize: False leaves `text` empty, and rules out `stop`.
    output_kind: what each output of a stream holds.
    truncate_prompt_tokens: keep only that many of the last tokens of the prompt; -1: as many as the model can take.
    structured_outputs: what the text must match, unless `max_tokens` or a stop cuts it off. Once nothing can be added the
        model's end-of-sequence token ends it, also before `min_tokens` and where `allowed_token_ids`, `bad_words` or logits
        processors forbid it or all else; with `ignore_eos` that token is repeated.
    extra_args: for custom logits processors; the engine only passes them on.

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
    prompt_logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # a copy once built: do not write to it
    allowed_token_ids: Sequence[int] | None = None  # a tuple once built
    bad_words: Sequence[str] = ()  # a tuple once built
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a copy once built

    def __post_init__(self) -> None:
        self._copy_collections()
        self._check_numbers()
        self._check_penalties()
        self._check_tokens()
        self._check_text()
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)

    def _copy_collections(self) -> None:
        """Into tuples and dicts of its own, whatever they were given as."""
        _require(not isinstance(self.bad_words, str), f"bad_words must be a list of strings, got {self.bad_words!r}")
        words = _tuple("bad_words_token_ids", self.bad_words_token_ids)
        own: dict[str, object] = {
            "stop": self.stop_strings,
            "stop_token_ids": _tuple("stop_token_ids", self.stop_token_ids),
            "bad_words": _tuple("bad_words", self.bad_words),
            "bad_words_token_ids": tuple(_tuple("bad_words_token_ids", word) for word in words),
            "logit_bias": _copy("logit_bias", self.logit_bias),
            "extra_args": _copy("extra_args", self.extra_args),
        }
        if self.allowed_token_ids is not None:
            own["allowed_token_ids"] = _tuple("allowed_token_ids", self.allowed_token_ids)
        for name, value in own.items():
            object.__setattr__(self, name, value)

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
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                count is None or (_whole(count) and 0 <= count <= MAX_LOGPROBS),
                f"{name} must be an integer in [0, {MAX_LOGPROBS}] or None, got {count!r}",
            )
        _require(_whole(self.n) and 1 <= self.n <= MAX_NUM_SEQUENCES, f"n must be an integer in [1, {MAX_NUM_SEQUENCES}], got {self.n!r}")
        cut = self.truncate_prompt_tokens
        _require(
            cut is None or (_whole(cut) and (cut >= 1 or cut == -1)),
            f"truncate_prompt_tokens must be an integer >= 1, -1 or None, got {cut!r}",
        )

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, f"{name} must be in [-2, 2], got {value!r}")
        value = self.repetition_penalty
        _require(_finite(value) and 0 < value <= 2, f"repetition_penalty must be in (0, 2], got {value!r}")

    def _check_tokens(self) -> None:
        for token_id, bias in self.logit_bias.items():
            _require(_whole(token_id) and token_id >= 0, f"logit_bias must have token ids >= 0 as keys, got {token_id!r}")
            _require(
                _finite(bias) and abs(bias) <= MAX_LOGIT_BIAS,
                f"logit_bias must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], got {bias!r} for token {token_id}",
            )
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids must not be empty: nothing could be sampled")
        bad = [token_id for word in self.bad_words_token_ids for token_id in word]
        listed = (
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words_token_ids", bad),
        )
        for name, token_ids in listed:
            for token_id in token_ids:
                _require(_whole(token_id) and token_id >= 0, f"{name} must hold integers >= 0, got {token_id!r}")

    def _check_text(self) -> None:
        for name, texts in (("stop", self.stop_strings), ("bad_words", self.bad_words)):
            for text in texts:
                _require(isinstance(text, str) and text != "", f"{name} must hold non-empty strings, got {text!r}")
        if not self.detokenize:
            _require(not self.stop_strings, f"stop {list(self.stop_strings)!r} needs the text, which detokenize=False leaves out")
        _require(
            isinstance(self.output_kind, RequestOutputKind),
            f"output_kind must be a RequestOutputKind, got {self.output_kind!r}",
        )
        structured = self.structured_outputs
        _require(
            structured is None or isinstance(structured, StructuredOutputsParams),
            f"structured_outputs must be StructuredOutputsParams or None, got {structured!r}",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is once built, whatever form it was given in."""
        return (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE
