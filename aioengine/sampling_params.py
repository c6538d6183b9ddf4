"""How to turn logits into tokens, and when to stop. The names and the meanings are vLLM's."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aioengine.checks.fields as fields
from aioengine.checks.contradictions import why_nothing_is_left
from aioengine.checks.fields import require
from aioengine.checks.values import shorten
from aioengine.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature means greedy: the division by it would overflow float32 logits."""

MIN_TEMPERATURE = 1e-2
"""Positive temperatures are raised to this, so that scaled logits stay finite."""

MAX_TEMPERATURE = 1e6
"""Far above it scaled logits are all equal in float32, and beyond 3e38 they are not numbers."""

MIN_REPETITION_PENALTY = 1e-2
"""Logits divided by less can leave float32."""

MAX_LOGPROBS = 20

MAX_NUM_SEQUENCES = 1024
"""The largest `n`: each continuation is a request of its own to the scheduler."""

MAX_LOGIT_BIAS = 100.0

MAX_PATTERN_SIZE = 1024
"""Of repetition detection: a token costs at worst that many look-ups."""

MAX_PATTERN_COUNT = 65536

MAX_TOP_K = 2**31 - 1
"""Tables on a device hold int32; no vocabulary is as large."""

MAX_NUM_TOKENS = 2**63 - 1
"""Of max_tokens and the like, which the model's length bounds further: what the wire form and an int64 table hold."""

MAX_TOKEN_IDS = 1 << 19
"""Of allowed_token_ids and logit_bias: twice the largest vocabulary there is."""

# What is gone through for every token must stay small.
MAX_STOP_TOKEN_IDS = 4096
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 4096  # together
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_CHARS = 4096
MAX_BAD_WORD_TOKENS = 64

MAX_CHOICES = 1 << 16
MAX_GRAMMAR_CHARS = 1 << 20
MAX_EXTRA_ARGS = 1024


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
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)  # None: not asked for, as for the other fields
            object.__setattr__(self, name, value is not None and fields.flag(f"structured_outputs.{name}", value))
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        require(
            len(given) == 1,
            f"structured_outputs needs exactly one of json, regex, choice, grammar and json_object, got {', '.join(given) or 'none'}",
        )
        if given != ["json_object"]:
            object.__setattr__(self, given[0], self._read(given[0]))

    def _read(self, given: str) -> object:
        name, value = f"structured_outputs.{given}", getattr(self, given)
        if given == "json":
            return fields.json_schema(name, value, most_chars=MAX_GRAMMAR_CHARS)
        if given == "choice":
            choice = fields.texts(name, value, most=MAX_CHOICES, most_chars=MAX_GRAMMAR_CHARS)
            require(bool(choice), f"{name} must hold non-empty strings, got {shorten(value)}")
            return choice
        text = fields.text(f"{name} must be a non-empty string", name, value)
        require(len(text) <= MAX_GRAMMAR_CHARS, f"{name} has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
        return text


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends an output whose last tokens are a pattern again and again, as small models readily get stuck in one.

    max_pattern_size: the longest pattern that is looked for, in tokens, at most 1024; 0 looks for none.
    min_pattern_size: the shortest one; 0 means 1.
    min_count: how many times in a row it has to come, at least 2 and at most 65536.

    Raises InvalidRequestError naming the field, its value and the limit.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        limits = (("max_pattern_size", MAX_PATTERN_SIZE), ("min_pattern_size", MAX_PATTERN_SIZE), ("min_count", MAX_PATTERN_COUNT))
        for name, limit in limits:
            value = fields.whole(f"repetition_detection.{name}", getattr(self, name), least=0, most=limit)
            object.__setattr__(self, name, value)
        require(
            self.min_pattern_size <= self.max_pattern_size,
            f"repetition_detection.min_pattern_size ({self.min_pattern_size}) must not exceed max_pattern_size ({self.max_pattern_size})",
        )
        require(
            self.max_pattern_size == 0 or self.min_count >= 2,
            f"repetition_detection.min_count must be at least 2, got {self.min_count!r}: once is no repetition",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one generation, checked when they are built.

    temperature: in [0, 1e6]. 0 is greedy; values under 0.01 are raised to 0.01, as dividing by them overflows.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens whose probabilities add up to at least top_p, in (0, 1].
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: makes the output a function of prompt, parameters and seed alone, whatever else runs. None: a fresh one.
    max_tokens: at most this many tokens; None: until the model's length, or the KV cache, is full.
    min_tokens: no eos, stop id or stop string before this many tokens.
    stop: strings that end the output; the text is cut before the string unless `include_stop_str_in_output`. The text of
        special tokens counts, also where `skip_special_tokens` leaves it out of `text`.
    stop_token_ids: token ids that end the output. The id is in `token_ids`, its text is not in `text`.
    ignore_eos: generate on after the model's end-of-sequence tokens.
    skip_special_tokens: leave special tokens out of `text`.
    logprobs: report the log-probability of each sampled token and of the `logprobs` most likely ones (at most 20); the
        engine's `logprobs_mode` says from which logits. 0 reports the sampled token only; None reports nothing.
    prompt_logprobs: the same for the tokens of the prompt, each given those before it.
    n: how many continuations, each with its own index and a seed derived from `seed`; they share the prompt's KV blocks.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens that the output holds: once, and once for
        each time; in [-2, 2].
    repetition_penalty: logits of tokens that prompt or output hold are divided by it if positive, else multiplied; in
        [0.01, 2].
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
    repetition_detection: end an output whose last tokens keep repeating; its finish_reason is "repetition". Not before
        `min_tokens`; an end-of-sequence token, a stop and the length go before it.
    extra_args: for custom logits processors; the engine only passes them on.

    Numbers of NumPy become plain ones, and sets come sorted. Lists have limits (MAX_... in this module), as what is done for
    every token must stay small.

    Raises InvalidRequestError naming the parameter, its value and the limit, and for parameters that leave no token to sample.
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
    repetition_detection: RepetitionDetectionParams | None = None

    def __post_init__(self) -> None:
        # Most are left at their defaults, which need no reading.
        given = {name for name, default in _DEFAULTS.items() if getattr(self, name) is not default}
        for read in (self._read_numbers, self._read_lists, self._read_flags):
            for name, value in read(given):
                object.__setattr__(self, name, value)
        if GREEDY_TEMPERATURE <= self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        self._check_together()

    def _read_numbers(self, given: Container[str]) -> Iterator[tuple[str, float | None]]:
        """Every number, as a plain one within its limits. Those of tables of a fixed width fit into them."""
        for name, least, most, above_least in _RANGES:
            if name in given:
                yield name, fields.number(name, getattr(self, name), least=least, most=most, above_least=above_least)
        for name, low, high, note in _WHOLE_RANGES:
            if name in given:
                value = getattr(self, name)
                is_none = value is None and note.endswith("None")
                yield name, None if is_none else fields.whole(name, value, least=low, most=high, note=note)
        require(self.truncate_prompt_tokens != 0, "truncate_prompt_tokens must be an integer >= 1, -1 or None, got 0")

    def _read_lists(self, given: Container[str]) -> Iterator[tuple[str, object]]:
        """Collections of its own, whatever they were given as."""
        if "stop" in given:
            stop = [self.stop] if isinstance(self.stop, str) else self.stop
            yield "stop", fields.texts("stop", stop, most=MAX_STOP_STRINGS, most_chars=MAX_STOP_CHARS)
        if "stop_token_ids" in given:
            yield "stop_token_ids", fields.token_ids("stop_token_ids", self.stop_token_ids, most=MAX_STOP_TOKEN_IDS)
        if "bad_words" in given:
            yield "bad_words", fields.texts("bad_words", self.bad_words, most=MAX_BAD_WORDS, most_chars=MAX_BAD_WORD_CHARS)
        if "bad_words_token_ids" in given:
            words = fields.items("bad_words_token_ids", self.bad_words_token_ids, most=2 * MAX_BAD_WORDS)
            yield "bad_words_token_ids", tuple(fields.token_ids("bad_words_token_ids", word, most=MAX_BAD_WORD_TOKENS) for word in words)
        if "allowed_token_ids" in given:
            allowed = fields.token_ids("allowed_token_ids", self.allowed_token_ids, most=MAX_TOKEN_IDS)
            require(len(allowed) > 0, "allowed_token_ids must not be empty: nothing could be sampled")
            yield "allowed_token_ids", allowed
        yield "logit_bias", fields.biases("logit_bias", self.logit_bias, most=MAX_TOKEN_IDS, bound=MAX_LOGIT_BIAS)
        yield "extra_args", fields.text_keys("extra_args", self.extra_args, most=MAX_EXTRA_ARGS)

    def _read_flags(self, given: Container[str]) -> Iterator[tuple[str, bool]]:
        for name in _FLAGS:
            if name in given:
                yield name, fields.flag(name, getattr(self, name))

    def _check_together(self) -> None:
        """What is in order by itself and makes no sense beside the others."""
        require(
            isinstance(self.output_kind, RequestOutputKind), f"output_kind must be a RequestOutputKind, got {shorten(self.output_kind)}"
        )
        structured = self.structured_outputs
        require(
            structured is None or isinstance(structured, StructuredOutputsParams),
            f"structured_outputs must be StructuredOutputsParams or None, got {shorten(structured)}",
        )
        repetition = self.repetition_detection
        require(
            repetition is None or isinstance(repetition, RepetitionDetectionParams),
            f"repetition_detection must be RepetitionDetectionParams or None, got {shorten(repetition)}",
        )
        if self.max_tokens is not None:
            require(self.min_tokens <= self.max_tokens, f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if not self.detokenize:
            require(not self.stop, f"stop {shorten(list(self.stop or ()))} needs the text, which detokenize=False leaves out")
        self.check_any_token_is_left(eos_token_ids=(), vocab_size=None)

    def check_any_token_is_left(self, *, eos_token_ids: Collection[int], vocab_size: int | None) -> None:
        """Raise InvalidRequestError if the parameters together forbid every token, as far as the model is known.

        eos_token_ids: of the model. vocab_size: None: not known.
        """
        if self.allowed_token_ids is None and not self.bad_words_token_ids and not self.min_tokens:
            return
        # A structured output's own mask knows of min_tokens, and of the end of the output.
        is_structured = self.structured_outputs is not None
        cause = why_nothing_is_left(
            self.allowed_token_ids,
            () if is_structured and self.allowed_token_ids is None else self.bad_words_token_ids,
            min_tokens=0 if is_structured else self.min_tokens,
            max_tokens=1 if is_structured else self.max_tokens,
            ending={*self.stop_token_ids, *eos_token_ids},
            vocab_size=vocab_size,
        )
        if cause is not None:
            raise InvalidRequestError(f"no token is left to sample: {cause}")

    def with_values(self, **values: Any) -> SamplingParams:
        """A copy with other values, which are known to be in order: nothing is checked or copied again.

        `dataclasses.replace` would go through a logit_bias of 40,000 tokens once more each time.
        """
        copy = object.__new__(SamplingParams)
        for name in _NAMES:
            object.__setattr__(copy, name, values[name] if name in values else getattr(self, name))
        return copy

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, which it is once built."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
_NAMES = tuple(_DEFAULTS)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize")
_RANGES: tuple[tuple[str, float, float, bool], ...] = (  # name, from, to, without the first
    ("temperature", 0, MAX_TEMPERATURE, False),
    ("top_p", 0, 1, True),
    ("min_p", 0, 1, False),
    ("presence_penalty", -2, 2, False),
    ("frequency_penalty", -2, 2, False),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 2, False),
)
_WHOLE_RANGES = (  # name, from, to, and what else may be said: "None" at the end allows it
    ("top_k", -1, MAX_TOP_K, " (0 and -1 keep all tokens)"),
    ("min_tokens", 0, MAX_NUM_TOKENS, ""),
    ("n", 1, MAX_NUM_SEQUENCES, ""),
    ("seed", 0, 2**64 - 1, " or None"),
    ("max_tokens", 1, MAX_NUM_TOKENS, " or None"),
    ("logprobs", 0, MAX_LOGPROBS, " or None"),
    ("prompt_logprobs", 0, MAX_LOGPROBS, " or None"),
    ("truncate_prompt_tokens", -1, MAX_NUM_TOKENS, ", without 0, or None"),
)
