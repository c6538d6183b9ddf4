"""What is asked of the engine: the datasets, each a function from a tokenizer and a seed to a list of requests.

Every prompt is handed over as token ids, so that a length is what it says. Where a prompt is made up it also is what its
own text tokenizes to, so that a server that takes text sees the same length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import orjson

from aioengine.engine.outputs.detokenizer import TextTokenizer
from aioengine.errors import ConfigError
from aioengine_bench.random_prompts import RandomPrompts
from aioengine_bench.specs import DatasetName, DatasetSpec
from aioengine_bench.workloads import load_workload

# Of ShareGPT conversations, those that make sensible requests; the limits are the ones that other tools use.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048
_TRACE_BLOCK = 512  # tokens that one hash of a Mooncake trace stands for
_JOINT = 4


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    max_tokens: int
    ignore_eos: bool = True  # False: it may end earlier
    arrival_time: float | None = None  # seconds after the start, where the dataset is a trace

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


def check_lengths(requests: Sequence[BenchRequest], max_model_len: int) -> None:
    """Raise ConfigError if an answer would be cut off: figures of other lengths than those asked for are worth nothing.

    A prompt that is too long by itself is that request's failure, and counted as one.
    """
    for index, request in enumerate(requests):
        if request.prompt_len < max_model_len < request.prompt_len + request.max_tokens:
            raise ConfigError(
                f"request {index} asks for {request.max_tokens} tokens after {request.prompt_len}, but max_model_len is {max_model_len}: "
                f"shorten it, or allow {request.prompt_len + request.max_tokens} with --max-model-len"
            )


@dataclass(frozen=True, slots=True)
class _Source:
    """What requests are made from."""

    tokenizer: TextTokenizer
    vocab_size: int
    random: Random

    def prompts(self) -> RandomPrompts:
        return RandomPrompts(self.tokenizer, vocab_size=self.vocab_size, random=self.random)


def load_dataset(spec: DatasetSpec, tokenizer: TextTokenizer, *, vocab_size: int) -> list[BenchRequest]:
    """The requests, the same for the same arguments. Raises ConfigError naming file and line of what is wrong."""
    if spec.workload is not None:
        fixed = load_workload(spec.workload).requests[: spec.num_prompts]
        requests = [BenchRequest(request.prompt_token_ids, request.max_tokens) for request in fixed]
    else:
        requests = _LOADERS[spec.name](spec, _Source(tokenizer, vocab_size, Random(spec.seed)))
    if spec.ignore_eos is not None:
        requests = [replace(request, ignore_eos=spec.ignore_eos) for request in requests]
    return requests


# ---------------------------------------------------------------------------------------------------- made up
def _random(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    prompts = source.prompts()
    prefix = prompts.make(spec.prefix_len) if spec.prefix_len else []
    requests = []
    for _ in range(spec.num_prompts):
        input_len = _vary(spec.input_len or 1024, spec.range_ratio, source.random)
        output_len = _vary(spec.output_len or 128, spec.range_ratio, source.random)
        requests.append(BenchRequest(prompts.extend(prefix, input_len), output_len))
    return requests


def _vary(length: int, ratio: float, random: Random) -> int:
    return max(1, random.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def _prefix_repetition(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    prompts = source.prompts()
    prefixes = [prompts.make(spec.prefix_len) for _ in range(spec.num_prefixes)]
    requests = [
        BenchRequest(prompts.extend(prefixes[index % spec.num_prefixes], spec.input_len or 256), spec.output_len or 128)
        for index in range(spec.num_prompts)
    ]
    source.random.shuffle(requests)
    return requests


def _burst(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    """Nothing, then `burst_size` requests at once, every `burst_interval` seconds."""
    return [
        replace(request, arrival_time=(index // spec.burst_size) * spec.burst_interval)
        for index, request in enumerate(_random(replace(spec, input_len=spec.input_len or 256), source))
    ]


def _text(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    """Sentences of the bundled text in random order, as many as fit, cut to the length; the first `prefix_len` are shared."""
    sentences: list[str] = orjson.loads(files("aioengine_bench").joinpath("text.json").read_bytes())
    pieces = [source.tokenizer.encode(" " + sentence, add_special_tokens=False) for sentence in sentences]
    prefix = _fill(pieces, spec.prefix_len, source.random)
    return [
        BenchRequest(prefix + _fill(pieces, spec.input_len or 256, source.random), spec.output_len or 128, ignore_eos=True)
        for _ in range(spec.num_prompts)
    ]


def _fill(pieces: Sequence[list[int]], length: int, random: Random) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < length:
        token_ids += random.choice(pieces)
    return token_ids[:length]


# ---------------------------------------------------------------------------------------------------- from files
def _sharegpt(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    """The first question of each conversation; the length of the answer is that of the recorded one."""
    assert spec.path is not None
    conversations = _read_json(spec.path)
    if not isinstance(conversations, list):
        raise ConfigError(f"{spec.path} is not a JSON list of conversations")
    pairs = [pair for index, entry in enumerate(conversations) if (pair := _first_turns(spec, index, entry)) is not None]
    source.random.shuffle(pairs)
    requests: list[BenchRequest] = []
    for question, answer in pairs:
        if len(requests) == spec.num_prompts:
            break
        prompt = source.tokenizer.encode(question)
        output_len = spec.output_len or len(source.tokenizer.encode(answer, add_special_tokens=False))
        fits = _MIN_TOKENS <= len(prompt) <= _MAX_PROMPT_TOKENS and len(prompt) + output_len <= _MAX_TOTAL_TOKENS
        # A length that was asked for is taken as it is; a recorded answer of a word or two is no sensible one.
        if fits and (spec.output_len is not None or output_len >= _MIN_TOKENS):
            requests.append(BenchRequest(prompt, output_len, ignore_eos=False))
    return _repeat(requests, spec)


def _first_turns(spec: DatasetSpec, index: int, entry: Any) -> tuple[str, str] | None:
    """The first two turns of a conversation; None if it is shorter. Raises ConfigError for what is no conversation."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"{spec.path}, entry {index}: must be an object with a list `conversations`, got {_short(entry)}")
    values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
    if len(values) < 2:
        return None
    if not isinstance(values[0], str) or not isinstance(values[1], str):
        raise ConfigError(f"{spec.path}, entry {index}: the first turns must have a text `value`, got {_short(turns[:2])}")
    return values[0], values[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _custom(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    """JSON lines with `prompt` (text or token ids) or `messages`, and optionally `output_tokens`."""
    requests = []
    for number, line in _lines(spec):
        prompt, messages = line.get("prompt"), line.get("messages")
        if isinstance(prompt, str) and prompt:
            token_ids = source.tokenizer.encode(prompt)
        elif isinstance(prompt, list) and prompt:
            token_ids = _check_token_ids(spec, number, prompt, source.vocab_size)
        elif isinstance(messages, list) and messages:
            token_ids = _encode_messages(spec, number, messages, source.tokenizer)
        else:
            raise ConfigError(f"{spec.path}, line {number}: needs a `prompt` (text or token ids) or `messages`")
        requests.append(BenchRequest(token_ids, spec.output_len or _whole(spec, number, line, "output_tokens", 256), ignore_eos=False))
    return _repeat(requests, spec)


def _check_token_ids(spec: DatasetSpec, number: int, prompt: list[Any], vocab_size: int) -> list[int]:
    for token_id in prompt:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ConfigError(f"{spec.path}, line {number}: token ids must be integers from 0 to {vocab_size - 1}, got {_short(token_id)}")
    return prompt


def _encode_messages(spec: DatasetSpec, number: int, messages: list[Any], tokenizer: TextTokenizer) -> list[int]:
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"{spec.path}, line {number}: a message needs a text `role` and `content`, got {_short(message)}")
    try:
        text = tokenizer.apply_chat_template(messages)
    except Exception as exc:  # a template refuses conversations with exceptions of its own
        raise ConfigError(f"{spec.path}, line {number}: the chat template refused the messages: {exc}") from exc
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class _TraceRow:
    timestamp: float  # milliseconds
    input_len: int
    output_len: int
    hash_ids: list[int] | None  # of its blocks, where the trace tells which are shared


def _timed_trace(spec: DatasetSpec, source: _Source) -> list[BenchRequest]:
    """JSON lines with `timestamp` (milliseconds), `input_length` and `output_length`: lengths and times of real traffic.

    Sorted by time: traces that were put together from several machines are not. The first one arrives at 0. With `hash_ids`
    (Mooncake's traces), one for each 512 tokens of the prompt, blocks with the same id are the same tokens.
    """
    rows: list[_TraceRow] = []
    for number, line in _lines(spec):
        timestamp = line.get("timestamp")
        if not isinstance(timestamp, (int, float)) or isinstance(timestamp, bool) or not math.isfinite(timestamp):
            raise ConfigError(f"{spec.path}, line {number}: `timestamp` must be a number of milliseconds, got {_short(timestamp)}")
        input_len, output_len = _whole(spec, number, line, "input_length", None), _whole(spec, number, line, "output_length", None)
        rows.append(_TraceRow(timestamp, input_len, output_len, _hash_ids(spec, number, line, input_len)))
    if not rows:
        raise ConfigError(f"{spec.path} has no usable request")
    rows.sort(key=lambda row: row.timestamp)
    prompts = source.prompts()
    blocks: dict[int, list[int]] = {}
    return [
        BenchRequest(
            prompts.make(row.input_len) if row.hash_ids is None else _join_blocks(row.hash_ids, row.input_len, blocks, prompts),
            row.output_len,
            arrival_time=(row.timestamp - rows[0].timestamp) / 1000,
        )
        for row in rows[: spec.num_prompts]
    ]


def _hash_ids(spec: DatasetSpec, number: int, line: Mapping[str, Any], input_len: int) -> list[int] | None:
    ids = line.get("hash_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(value) is int for value in ids):
        raise ConfigError(f"{spec.path}, line {number}: `hash_ids` must be a list of whole numbers, got {_short(ids)}")
    num_blocks = -(-input_len // _TRACE_BLOCK)
    if len(ids) != num_blocks:
        raise ConfigError(
            f"{spec.path}, line {number}: {input_len} tokens are {num_blocks} blocks of {_TRACE_BLOCK}, but `hash_ids` has {len(ids)}"
        )
    return ids


def _join_blocks(ids: Sequence[int], length: int, blocks: dict[int, list[int]], prompts: RandomPrompts) -> list[int]:
    """The prompt of these blocks, the last one cut to `length`. Each id's tokens are drawn when it is first met."""
    token_ids: list[int] = []
    for block_id in ids:
        if block_id not in blocks:
            # After a few tokens of what it follows, so that they do not merge.
            joint = token_ids[-_JOINT:]
            blocks[block_id] = prompts.extend(joint, _TRACE_BLOCK)[len(joint) :]
        token_ids += blocks[block_id]
    return token_ids[:length]


def _whole(spec: DatasetSpec, number: int, line: Mapping[str, Any], key: str, default: int | None) -> int:
    value = line.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{spec.path}, line {number}: `{key}` must be a whole number above 0, got {_short(value)}")
    return value


def _repeat(requests: Sequence[BenchRequest], spec: DatasetSpec) -> list[BenchRequest]:
    """As many as were asked for: a small file is gone through again."""
    if not requests:
        raise ConfigError(f"{spec.path} has no usable request")
    return [requests[index % len(requests)] for index in range(spec.num_prompts)]


def _lines(spec: DatasetSpec) -> Iterator[tuple[int, dict[str, Any]]]:
    assert spec.path is not None
    for number, line in enumerate(_read_bytes(spec.path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as exc:
            raise ConfigError(f"{spec.path}, line {number}: {exc}") from exc
        if not isinstance(value, dict):
            raise ConfigError(f"{spec.path}, line {number}: is not a JSON object")
        yield number, value


def _read_json(path: str) -> Any:
    try:
        return orjson.loads(_read_bytes(path))
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc


_LOADERS: dict[DatasetName, Callable[[DatasetSpec, _Source], list[BenchRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "text": _text,
    "prefix_repetition": _prefix_repetition,
    "burst": _burst,
    "timed_trace": _timed_trace,
    "custom": _custom,
}
