"""For tests, of this package and of programs that use it: an engine without a model, and small requests and schedulers.

    engine = AsyncEngine(executor=FakeExecutor(), tokenizer=FakeTokenizer())

Nothing here imports torch. `FakeExecutor` follows the worker's side of the `SchedulerOutput` contract to the letter and
fails a step that breaks it, so an engine test is a scheduler test as well.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aioengine.config import CacheConfig, ModelInfo, SchedulerConfig
from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from aioengine.errors import EngineDeadError
from aioengine.executor.base import GrammarOutput
from aioengine.executor.worker_thread import WorkerThread
from aioengine.outputs import Logprob, ModelRunnerOutput, TokenLogprobs, WorkerTiming
from aioengine.request import Request
from aioengine.sampling_params import SamplingParams

Phase = Literal["execute", "sample"]

NextToken = Callable[[Sequence[int], int, SamplingParams], int]
"""(prompt and output token ids so far, number of prompt tokens, sampling params) -> the next token id."""

EOS_TOKEN_ID = 256
BOS_TOKEN_ID = 257
_SPECIAL_TOKENS = {EOS_TOKEN_ID: "<eos>", BOS_TOKEN_ID: "<bos>", 258: "<|user|>", 259: "<|assistant|>", 260: "<|system|>"}
_VOCAB_SIZE = 261

_request_numbers = itertools.count(1)


# ---------------------------------------------------------------------------------------------------- tokens
class FakeTokenizer:
    """One token a byte of UTF-8, then a few special tokens. Satisfies `aioengine.engine.detokenizer.TextTokenizer`."""

    has_chat_template = True
    vocab_size = _VOCAB_SIZE
    special_token_ids = frozenset(_SPECIAL_TOKENS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Bytes, with special tokens recognised in the text; `add_special_tokens` puts <bos> in front."""
        token_ids = [BOS_TOKEN_ID] if add_special_tokens else []
        while text:
            found = [(text.find(name), token_id, name) for token_id, name in _SPECIAL_TOKENS.items() if name in text]
            start, token_id, name = min(found, default=(len(text), -1, ""))
            token_ids += text[:start].encode()
            if token_id >= 0:
                token_ids.append(token_id)
            text = text[start + len(name) :]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Incomplete or invalid UTF-8 becomes U+FFFD."""
        parts = [
            bytes([token_id]) if token_id < 256 else b"" if skip_special_tokens else _SPECIAL_TOKENS[token_id].encode()
            for token_id in token_ids
        ]
        return b"".join(parts).decode(errors="replace")

    def token_bytes(self) -> list[bytes]:
        """What each token id stands for in a text, for structured outputs."""
        return [bytes([token_id]) if token_id < 256 else _SPECIAL_TOKENS[token_id].encode() for token_id in range(_VOCAB_SIZE)]

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """ "<bos><|user|>Hi<eos><|assistant|>"; raises ValueError for an unknown role, as real templates do."""
        text = "<bos>"
        for message in messages:
            if message["role"] not in ("system", "user", "assistant"):
                raise ValueError(f"unknown role {message['role']!r}")
            text += f"<|{message['role']}|>{message['content']}<eos>"
        return text + ("<|assistant|>" if add_generation_prompt else "")


def default_next_token(token_ids: Sequence[int], num_prompt_tokens: int, sampling_params: SamplingParams) -> int:
    """A printable character that depends on all tokens so far, and on the seed unless decoding is greedy."""
    seed = 0 if sampling_params.is_greedy else (sampling_params.seed or 0)
    return 32 + zlib.crc32(array("q", token_ids).tobytes(), seed & 0xFFFFFFFF) % 95


def scripted(answer: str | Sequence[int], *, then: int = EOS_TOKEN_ID) -> NextToken:
    """Every request is answered with these tokens (text: its bytes), and then with `then` for ever."""
    token_ids = list(answer.encode() if isinstance(answer, str) else answer)

    def next_token(known: Sequence[int], num_prompt_tokens: int, sampling_params: SamplingParams) -> int:
        index = len(known) - num_prompt_tokens
        return token_ids[index] if index < len(token_ids) else then

    return next_token


# ---------------------------------------------------------------------------------------------------- builders
def make_model_info(*, vocab_size: int = _VOCAB_SIZE, max_position_embeddings: int = 4096) -> ModelInfo:
    """The facts of a model that does not exist."""
    return ModelInfo(
        name="fake",
        path="",
        architecture="Fake",
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        bos_token_id=BOS_TOKEN_ID,
    )


def make_request(
    prompt: int | Sequence[int] = 8, *, request_id: str | None = None, priority: int = 0, cache_salt: str | None = None, **params: Any
) -> Request:
    """A request as the input processor would hand it to the scheduler.

    prompt: token ids, or how many (then ids that differ from other requests' are made up). params: of SamplingParams.
    """
    number = next(_request_numbers)
    token_ids = [(number * 31 + index * 7) % 256 for index in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id or f"test-{number}",
        token_ids,
        sampling_params=SamplingParams(**{"temperature": 0.0, "seed": 0, **params}),
        arrival_time=float(number),
        priority=priority,
        cache_salt=cache_salt,
    )


def make_scheduler(
    *,
    num_kv_cache_blocks: int = 65,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    eos_token_ids: frozenset[int] = frozenset({EOS_TOKEN_ID}),
    check_invariants: bool = True,
    **options: Any,
) -> Scheduler:
    """A small scheduler that checks itself. options: fields of SchedulerConfig (8 requests, 64 tokens a step, 256 a request)."""
    return Scheduler(
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **options}),
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching, prefix_caching_seed="test"),
        num_kv_cache_blocks=num_kv_cache_blocks,
        eos_token_ids=eos_token_ids,
        check_invariants=check_invariants,
    )


# ---------------------------------------------------------------------------------------------------- the executor
class ContractError(AssertionError):
    """A SchedulerOutput contradicts what the worker was told before."""


@dataclass(slots=True)
class _WorkerRequest:
    sampling_params: SamplingParams
    num_prompt_tokens: int
    token_ids: list[int]  # prompt and sampled ones, the latest included
    digests: list[int]  # one a token: depends on it and all before it; what the KV of that position would
    block_ids: list[int]
    num_computed_tokens: int = 0
    has_slot: bool = True
    num_prompt_logprobs: int = 1  # prompt tokens whose logprobs were reported; nothing comes before the first

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digests.append(hash((self.digests[-1] if self.digests else 0, token_id)))

    def digests_with(self, guesses: Sequence[int]) -> list[int]:
        """The digests of the tokens, and of guesses behind them."""
        digests = self.digests.copy() if guesses else self.digests
        for token_id in guesses:
            digests.append(hash((digests[-1], token_id)))
        return digests


@dataclass(frozen=True, slots=True)
class _Fault:
    step_id: int
    phase: Phase
    exception: BaseException | None
    hang_until: threading.Event | None = None


@dataclass(frozen=True, slots=True)
class _RequestFault:
    """A request whose logits cannot be sampled from."""

    num_output_tokens: int
    cause: str


@dataclass(slots=True)
class _Executed:
    """A step between its forward and its sampling."""

    step_id: int
    req_ids: list[str]
    samples: set[str]
    guesses: dict[str, list[int]]
    execute_start: float
    execute_end: float
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class FakeExecutor:
    """An `Executor` without a model: one worker thread, FIFO, deterministic tokens.

    A request's next token is a pure function of its known tokens, so chunking, preemption, prefix caching, overlap and
    batch mates must not change what a request gets. The worker checks each output against its own books (ids, block
    tables, positions, counts) and keeps, in place of keys and values, a digest of the whole prefix in each slot of the
    paged cache: a block that was freed too early or shared wrongly makes the step fail with a ContractError.

    num_blocks: KV blocks, the null block included, where the configuration does not say. max_num_seqs: worker slots.
    forward_s: each forward sleeps this long with the GIL released, as a device does.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 257,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        forward_s: float = 0.0,
        next_token: NextToken = default_next_token,
        model_info: ModelInfo | None = None,
    ) -> None:
        self.model_info = model_info or make_model_info()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.forward_s = forward_s
        self.outputs: list[SchedulerOutput] = []  # every step that was executed
        self.is_shut_down = False
        self._next_token = next_token
        self._requests: dict[str, _WorkerRequest] = {}
        self._kv_cache: list[list[int | None]] = []  # [num_blocks][block_size]
        self._executed: list[_Executed] = []
        self._last_step_id = 0
        self._faults: list[_Fault] = []
        self._request_faults: dict[str, _RequestFault] = {}
        self._released = threading.Event()
        self._unstuck = threading.Event()
        self._thread = WorkerThread("fake-worker")

    # ------------------------------------------------------------------ faults
    def fail_at(self, step_id: int, *, phase: Phase = "execute", exception: BaseException | None = None) -> None:
        """Make a step raise; both of its futures fail if it is in "execute"."""
        self._faults.append(_Fault(step_id, phase, exception or RuntimeError(f"injected failure in step {step_id}")))

    def hang_at(self, step_id: int, *, phase: Phase = "execute", through_shutdown: bool = False) -> None:
        """Make a step wait until `release()` or `shutdown()`.

        through_shutdown: until `release()` only, as a device does that never answers; `shutdown()` then waits for the step.
        """
        self._faults.append(_Fault(step_id, phase, None, self._unstuck if through_shutdown else self._released))

    def fail_request(self, request_id: str, *, num_output_tokens: int = 0, cause: str = "its logits are NaN") -> None:
        """Make the sampling of a request fail, and of no other, once it has that many output tokens.

        request_id: as the scheduler knows it: the user's, unless that was in use just before.
        """
        self._request_faults[request_id] = _RequestFault(num_output_tokens, cause)

    def release(self) -> None:
        """Let hanging steps go on."""
        self._released.set()
        self._unstuck.set()

    def _meet_fault(self, step_id: int, phase: Phase) -> None:
        for fault in self._faults:
            if (fault.step_id, fault.phase) == (step_id, phase):
                if fault.exception is not None:
                    raise fault.exception
                assert fault.hang_until is not None
                fault.hang_until.wait()

    def _fails(self, req_id: str, request: _WorkerRequest) -> str | None:
        fault = self._request_faults.get(req_id)
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        return fault.cause if fault is not None and num_output_tokens >= fault.num_output_tokens else None

    # ------------------------------------------------------------------ what a test may look at
    @property
    def req_ids(self) -> set[str]:
        """The requests that the worker has not been told to forget."""
        return set(self._requests)

    @property
    def num_used_slots(self) -> int:
        return sum(request.has_slot for request in self._requests.values())

    # ------------------------------------------------------------------ Executor
    def load_model(self) -> Future[None]:
        return self._thread.submit(lambda: None)

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        return self._thread.submit(lambda: self.num_blocks)

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return self._thread.submit(self._initialize_kv_cache, num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        return self._thread.submit(self._execute, scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        return self._thread.submit(self._sample, grammar_output)

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        call = getattr(self, method) if isinstance(method, str) else partial(method, self)
        return self._thread.submit(lambda: [call(*args)])

    def check_health(self) -> None:
        if self.is_shut_down:
            raise EngineDeadError("the executor was shut down")

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._released.set()
        self._thread.shutdown()

    # ------------------------------------------------------------------ the worker thread
    def _initialize_kv_cache(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._kv_cache = [[None] * self.block_size for _ in range(num_blocks)]

    def _execute(self, output: SchedulerOutput) -> None:
        execute_start = time.perf_counter()
        self._meet_fault(output.step_id, "execute")
        self.outputs.append(output)
        _expect(output.step_id == self._last_step_id + 1, f"step {output.step_id} after step {self._last_step_id}")
        self._last_step_id = output.step_id
        self._update_states(output)
        samples = self._forward(output)
        if self.forward_s and not output.is_cleanup_only:
            time.sleep(self.forward_s)
        req_ids = list(output.num_scheduled_tokens)
        guesses = output.scheduled_spec_decode_tokens
        prompt_logprobs = self._take_prompt_logprobs(output)
        self._executed.append(_Executed(output.step_id, req_ids, samples, guesses, execute_start, time.perf_counter(), prompt_logprobs))

    def _take_prompt_logprobs(self, output: SchedulerOutput) -> dict[str, list[TokenLogprobs]]:
        """Of the prompt tokens whose logits this step has computed, if they were not reported before."""
        taken = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            start, end = request.num_prompt_logprobs, min(request.num_computed_tokens + 1, request.num_prompt_tokens)
            if request.sampling_params.prompt_logprobs is None or start >= end:
                continue
            _expect(request.num_computed_tokens - num_tokens < start, f"{req_id!r} skips prompt positions whose logprobs it wants")
            taken[req_id] = [self._make_logprobs(t, request.sampling_params.prompt_logprobs) for t in request.token_ids[start:end]]
            request.num_prompt_logprobs = end
        return taken

    def _update_states(self, output: SchedulerOutput) -> None:
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)
        for req_id in output.preempted_req_ids:
            request = self._requests.get(req_id)
            _expect(request is not None and request.has_slot, f"{req_id!r} is preempted without a slot")
            assert request is not None
            request.has_slot, request.block_ids, request.num_computed_tokens = False, [], 0
        for block_id in output.new_block_ids_to_zero:
            self._kv_cache[block_id] = [None] * self.block_size
        for new in output.scheduled_new_reqs:
            self._add(new)
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            _expect(req_id in self._requests, f"{req_id!r} is unknown here but comes as a difference")
            self._update(req_id, self._requests[req_id], cached, index)
        used, limit = self.num_used_slots, self.max_num_seqs
        _expect(limit is None or used <= limit, f"{used} requests have slots, there are {limit}")
        scheduled = {new.req_id for new in output.scheduled_new_reqs} | set(cached.req_ids)
        _expect(scheduled == output.num_scheduled_tokens.keys(), "the new and the cached requests are not the scheduled ones")
        _expect(sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens, "the total is not the sum")

    def _add(self, new: NewRequestData) -> None:
        _expect(new.req_id not in self._requests, f"{new.req_id!r} is new but was here before")
        request = _WorkerRequest(new.sampling_params, len(new.prompt_token_ids), [], [], list(new.block_ids[0]), new.num_computed_tokens)
        for token_id in new.prompt_token_ids:
            request.append(token_id)
        self._requests[new.req_id] = request

    def _update(self, req_id: str, request: _WorkerRequest, cached: CachedRequestData, index: int) -> None:
        new_block_ids, start = cached.new_block_ids[index], cached.num_computed_tokens[index]
        if req_id in cached.resumed_req_ids:
            _expect(not request.has_slot, f"{req_id!r} is resumed but was not preempted")
            _expect(req_id in cached.all_token_ids, f"{req_id!r} is resumed without its history")
            assert new_block_ids is not None
            request.has_slot, request.block_ids, request.num_computed_tokens = True, list(new_block_ids[0]), start
        else:
            _expect(request.has_slot, f"{req_id!r} is scheduled without having been resumed")
            _expect(start == request.num_computed_tokens, f"{req_id!r} starts at {start}, the worker is at {request.num_computed_tokens}")
            request.block_ids += new_block_ids[0] if new_block_ids is not None else []
        history = cached.all_token_ids.get(req_id, request.token_ids)
        _expect(history == request.token_ids, f"the history of {req_id!r} is {history}, the worker's {request.token_ids}")
        num_output = len(request.token_ids) - request.num_prompt_tokens
        _expect(
            cached.num_output_tokens[index] == num_output, f"{req_id!r}: {cached.num_output_tokens[index]} output tokens, not {num_output}"
        )

    def _forward(self, output: SchedulerOutput) -> set[str]:
        """Write the digests of the scheduled positions, then read those of all positions; returns who samples."""
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            start = request.num_computed_tokens
            end = start + num_tokens
            table = request.block_ids
            _expect(num_tokens > 0, f"{req_id!r} is scheduled with {num_tokens} tokens")
            digests = request.digests_with(output.scheduled_spec_decode_tokens.get(req_id, ()))
            _expect(end <= len(digests), f"{req_id!r} is scheduled up to {end} and has {len(digests)} tokens")
            _expect(end <= len(table) * self.block_size, f"{req_id!r} needs {end} slots and has {len(table)} blocks")
            _expect(len(set(table)) == len(table), f"{req_id!r} has a block twice: {table}")
            _expect(all(0 < b < self.num_blocks for b in table), f"{req_id!r} has a block that cannot be: {table}")
            for position in range(start, end):
                self._kv_cache[table[position // self.block_size]][position % self.block_size] = digests[position]
            request.num_computed_tokens = end
        samples = set()
        for req_id in output.num_scheduled_tokens:
            request = self._requests[req_id]
            digests = request.digests_with(output.scheduled_spec_decode_tokens.get(req_id, ()))
            for position in range(request.num_computed_tokens):
                block_id = request.block_ids[position // self.block_size]
                held = self._kv_cache[block_id][position % self.block_size]
                _expect(held == digests[position], f"block {block_id} does not hold position {position} of {req_id!r}")
            if request.num_computed_tokens == len(digests):
                samples.add(req_id)
        return samples

    def _sample(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        sample_start = time.perf_counter()
        _expect(bool(self._executed), "there is no executed step to sample from")
        step = self._executed.pop(0)
        self._meet_fault(step.step_id, "sample")
        sampled: list[list[int]] = []
        logprobs: dict[str, list[TokenLogprobs]] = {}
        failed: dict[str, str] = {}
        bitmasks = grammar_output.bitmasks if grammar_output is not None else {}
        for req_id in step.req_ids:
            request = self._requests[req_id]
            if req_id not in step.samples:
                sampled.append([])
                continue
            token_ids, cause = self._sample_request(req_id, request, step.guesses.get(req_id, ()), bitmasks.get(req_id))
            if cause is not None:
                failed[req_id] = cause
                sampled.append([])
                continue
            sampled.append(token_ids)
            if (num_logprobs := request.sampling_params.logprobs) is not None:
                logprobs[req_id] = [self._make_logprobs(token_id, num_logprobs) for token_id in token_ids]
        timing = WorkerTiming(step.execute_start, step.execute_end, sample_start, time.perf_counter())
        return ModelRunnerOutput(
            step.req_ids,
            {req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled,
            logprobs=logprobs,
            timing=timing,
            prompt_logprobs=step.prompt_logprobs,
            failed_req_ids=failed,
        )

    def _sample_request(
        self, req_id: str, request: _WorkerRequest, guesses: Sequence[int], bitmask: bytes | None
    ) -> tuple[list[int], str | None]:
        """The tokens up to the first that is not its guess, and why this request fails, if it does."""
        token_ids: list[int] = []
        cause = None
        for guess in [*guesses, None]:
            cause = self._fails(req_id, request)
            token_ids.append(self._pick(request, bitmask))
            request.append(token_ids[-1])  # also of a failed one: a step that is already planned goes on from it
            if cause is not None or token_ids[-1] != guess:
                break
        if guesses and request.has_slot:
            request.num_computed_tokens = len(request.token_ids) - 1  # behind wrong guesses the step is undone
        return token_ids, cause

    def _make_logprobs(self, token_id: int, num_logprobs: int) -> TokenLogprobs:
        others = [(token_id + 1 + offset) % self.model_info.vocab_size for offset in range(max(0, num_logprobs - 1))]
        return {token: Logprob(-0.5 - rank, rank + 1) for rank, token in enumerate([token_id, *others])}

    def _pick(self, request: _WorkerRequest, bitmask: bytes | None) -> int:
        params = request.sampling_params
        token_id = self._next_token(request.token_ids, request.num_prompt_tokens, params)
        if bitmask is not None:
            return self._next_allowed(token_id, bitmask)
        if len(request.token_ids) - request.num_prompt_tokens < params.min_tokens:
            masked = self.model_info.eos_token_ids | set(params.stop_token_ids)
            while token_id in masked:
                token_id = (token_id + 1) % self.model_info.vocab_size
        return token_id

    def _next_allowed(self, token_id: int, bitmask: bytes) -> int:
        """The first token from `token_id` on, and around, that the grammar allows."""
        for offset in range(self.model_info.vocab_size):
            candidate = (token_id + offset) % self.model_info.vocab_size
            if bitmask[candidate // 8] >> candidate % 8 & 1:
                return candidate
        raise ContractError("a bitmask allows no token")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)
