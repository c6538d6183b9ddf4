"""An `Executor` without a model, whose worker checks every step that it is given."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import EngineDeadError
from aioengine.executor.base import GrammarOutput
from aioengine.executor.worker_thread import WorkerThread
from aioengine.kv_cache_groups import group_layers
from aioengine.outputs import ModelRunnerOutput, TokenLogprobs, WorkerTiming
from aioengine.resolved_config import ModelInfo
from aioengine.testing.books import ContractError, WorkerBooks, WorkerRequest, expect, make_logprobs
from aioengine.testing.builders import make_model_info
from aioengine.testing.tokens import NextToken, default_next_token
from aioengine.testing.virtual_time import LoopWorker

Phase = Literal["execute", "sample"]


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
    draft_token_ids: dict[str, list[int]]
    execute_start: float
    execute_end: float
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    pooled: dict[str, list[float]]
    failed: dict[str, str]  # requests that do not fit the tables, and why


class FakeExecutor:
    """An `Executor` without a model: one worker thread, FIFO, deterministic tokens.

    A request's next token is a pure function of its known tokens, so chunking, preemption, prefix caching, overlap and
    batch mates must not change what a request gets. The worker checks each output against its own books (ids, block
    tables, positions, counts) and keeps, in place of keys and values, a digest of the whole prefix in each slot of the
    paged cache: a block that was freed too early or shared wrongly makes the step fail with a ContractError. Parameters that do
    not fit the tables of a real worker end their request with an error, as they do there.

    num_blocks: KV blocks, the null block included, where the configuration does not say. max_num_seqs: worker slots.
    forward_s: each forward sleeps this long with the GIL released, as a device does.
    in_loop: there is no thread; each step runs in the event loop after `forward_s` seconds of the loop's clock. With a
    `VirtualTimeLoop` nothing waits, and who meets whom is the same in every run. `hang_at` needs the thread.
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
        in_loop: bool = False,
    ) -> None:
        self.model_info = model_info or make_model_info()
        self.forward_s = forward_s
        self.outputs: list[SchedulerOutput] = []  # every step that was executed
        self.is_shut_down = False
        self._next_token = next_token
        groups = group_layers(self.model_info.windows)
        self._books = WorkerBooks(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, groups=groups)
        self._executed: list[_Executed] = []
        self._faults: list[_Fault] = []
        self._request_faults: dict[str, _RequestFault] = {}
        self._released = threading.Event()
        self._unstuck = threading.Event()
        self._worker = LoopWorker() if in_loop else WorkerThread("fake-worker")

    # ------------------------------------------------------------------ faults
    def fail_at(self, step_id: int, *, phase: Phase = "execute", exception: BaseException | None = None) -> None:
        """Make a step raise; both of its futures fail if it is in "execute"."""
        self._faults.append(_Fault(step_id, phase, exception or RuntimeError(f"injected failure in step {step_id}")))

    def hang_at(self, step_id: int, *, phase: Phase = "execute", through_shutdown: bool = False) -> None:
        """Make a step wait until `release()` or `shutdown()`.

        through_shutdown: until `release()` only, as a device does that never answers; `shutdown()` then waits for the step.
        """
        if isinstance(self._worker, LoopWorker):
            raise ValueError("a step that hangs in the event loop would hang everything: hang_at() is for a FakeExecutor with a thread")
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

    def _fails(self, req_id: str, request: WorkerRequest) -> str | None:
        fault = self._request_faults.get(req_id)
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        return fault.cause if fault is not None and num_output_tokens >= fault.num_output_tokens else None

    # ------------------------------------------------------------------ what a test may look at
    @property
    def req_ids(self) -> set[str]:
        """The requests that the worker has not been told to forget."""
        return set(self._books.requests)

    @property
    def num_used_slots(self) -> int:
        return self._books.num_used_slots

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self._books.num_blocks

    @property
    def block_size(self) -> int:
        return self._books.block_size

    def forget_all(self) -> None:
        """Lose the worker's requests, as a worker that was restarted would: the next step that mentions one fails."""
        self._books.requests.clear()

    # ------------------------------------------------------------------ Executor
    def load_model(self) -> Future[None]:
        return self._worker.submit(lambda: None)

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        return self._worker.submit(lambda: self.num_blocks)

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return self._worker.submit(self._books.initialize_kv_cache, num_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        if isinstance(self._worker, LoopWorker):
            return self._worker.submit(self._execute, scheduler_output, after_s=self._time_of(scheduler_output))
        return self._worker.submit(self._execute, scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        return self._worker.submit(self._sample, grammar_output)

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        call = getattr(self, method) if isinstance(method, str) else partial(method, self)
        return self._worker.submit(lambda: [call(*args)])

    def load_lora(self, name: str, folder: str) -> str:
        """There is nothing to adapt: the tokens stay the same. The content is what the folder is called."""
        return hashlib.sha256(folder.encode()).hexdigest()

    def unload_lora(self, name: str) -> None:
        """Nothing was kept."""

    def check_health(self) -> None:
        if self.is_shut_down:
            raise EngineDeadError("the executor was shut down")

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._released.set()
        self._worker.shutdown()

    def _time_of(self, output: SchedulerOutput) -> float:
        return 0.0 if output.is_cleanup_only else self.forward_s

    # ------------------------------------------------------------------ the worker
    def _execute(self, output: SchedulerOutput) -> None:
        execute_start = time.perf_counter()
        self._meet_fault(output.step_id, "execute")
        self.outputs.append(output)
        self._books.apply(output)
        samples = self._books.forward(output)
        if isinstance(self._worker, WorkerThread) and (seconds := self._time_of(output)):
            time.sleep(seconds)
        req_ids = list(output.num_scheduled_tokens)
        draft_token_ids = output.scheduled_spec_decode_tokens
        prompt_logprobs = self._books.take_prompt_logprobs(output, vocab_size=self.model_info.vocab_size)
        pooled = self._books.take_pooled(output)
        failed = {req_id: cause for req_id, cause in self._books.failed.items() if req_id in output.num_scheduled_tokens}
        self._executed.append(
            _Executed(
                output.step_id, req_ids, samples, draft_token_ids, execute_start, time.perf_counter(), prompt_logprobs, pooled, failed
            )
        )

    def _sample(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        sample_start = time.perf_counter()
        expect(bool(self._executed), "there is no executed step to sample from")
        step = self._executed.pop(0)
        self._meet_fault(step.step_id, "sample")
        sampled: list[list[int]] = []
        logprobs: dict[str, list[TokenLogprobs]] = {}
        failed = dict(step.failed)
        bitmasks = grammar_output.bitmasks if grammar_output is not None else {}
        for req_id in step.req_ids:
            request = self._books.requests[req_id]
            if req_id not in step.samples:
                sampled.append([])
                continue
            token_ids, cause = self._sample_request(req_id, request, step.draft_token_ids.get(req_id, ()), bitmasks.get(req_id))
            if cause is not None or req_id in failed:
                failed.setdefault(req_id, cause or "")
                sampled.append([])
                continue
            sampled.append(token_ids)
            if (num_logprobs := request.sampling_params.logprobs) is not None:
                logprobs[req_id] = [make_logprobs(token_id, num_logprobs, vocab_size=self.model_info.vocab_size) for token_id in token_ids]
        timing = WorkerTiming(step.execute_start, step.execute_end, sample_start, time.perf_counter())
        return ModelRunnerOutput(
            step.req_ids,
            {req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled,
            logprobs=logprobs,
            timing=timing,
            prompt_logprobs={req_id: entries for req_id, entries in step.prompt_logprobs.items() if req_id not in failed},
            failed_req_ids=failed,
            pooler_output={req_id: vector for req_id, vector in step.pooled.items() if req_id not in failed},
        )

    def _sample_request(
        self, req_id: str, request: WorkerRequest, draft_token_ids: Sequence[int], bitmask: bytes | None
    ) -> tuple[list[int], str | None]:
        """The tokens up to the first that is not its draft token, and why this request fails, if it does."""
        token_ids: list[int] = []
        cause = None
        for draft_token_id in [*draft_token_ids, None]:
            cause = self._fails(req_id, request)
            token_ids.append(self._pick(request, bitmask))
            request.append(token_ids[-1])  # also of a failed one: a step that is already planned goes on from it
            if cause is not None or token_ids[-1] != draft_token_id:
                break
        if draft_token_ids and request.has_slot:
            request.num_computed_tokens = len(request.token_ids) - 1  # behind rejected draft tokens the step is undone
        return token_ids, cause

    def _pick(self, request: WorkerRequest, bitmask: bytes | None) -> int:
        params = request.sampling_params
        token_id = self._next_token(request.token_ids, request.num_prompt_tokens, params)
        if bitmask is not None:
            expect(len(bitmask) * 8 >= self.model_info.vocab_size, f"a bitmask of {len(bitmask)} bytes is too short")
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
