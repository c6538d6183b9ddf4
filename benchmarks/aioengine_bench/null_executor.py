"""An executor that computes nothing, so that what is left is the engine's own cost.

`aioengine.testing.FakeExecutor` checks every step against its own books and reads every cached position, which costs
more than the engine and holds the GIL meanwhile. This one knows only who samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.executor.base import GrammarOutput
from aioengine.outputs import ModelRunnerOutput, WorkerTiming

_TOKEN_ID = 97  # "a" for the tokenizer of tests


class StepSampler:
    """Tells from scheduler outputs alone which requests sample: those whose chunk reaches the end of what is known."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[str, int] = {}

    def __call__(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in output.finished_req_ids:
            self._num_prompt_tokens.pop(req_id, None)
        ends: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._num_prompt_tokens[new.req_id] = ends[new.req_id] = len(new.prompt_token_ids)
            ends[new.req_id] -= new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for req_id, start, num_output in zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True):
            ends[req_id] = self._num_prompt_tokens[req_id] + num_output - start
        req_ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids,
            {req_id: index for index, req_id in enumerate(req_ids)},
            [[_TOKEN_ID] if num_tokens == ends[req_id] else [] for req_id, num_tokens in output.num_scheduled_tokens.items()],
        )


class NullExecutor:
    """Satisfies `Executor`. Without `forward_s` everything is done at once, in the caller's thread, and `step_s` lists
    what that took; with it, each step sleeps so long in a worker thread, as a device would make it.
    """

    def __init__(self, *, forward_s: float = 0.0) -> None:
        self.step_s: list[float] = []
        self._forward_s = forward_s
        self._sampler = StepSampler()
        self._executed: deque[tuple[SchedulerOutput, float, float]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="null-worker") if forward_s else None

    def load_model(self) -> Future[None]:
        return _done(None)

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        raise NotImplementedError("the number of blocks is a setting where there is no memory to ask")

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return _done(None)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        if self._thread is not None:
            return self._thread.submit(self._execute, scheduler_output)
        self._execute(scheduler_output)
        return _done(None)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        if self._thread is not None:
            return self._thread.submit(self._sample)
        start = time.perf_counter()
        result = self._sample()
        self.step_s.append(time.perf_counter() - start)
        return _done(result)

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        raise NotImplementedError("there are no workers")

    def check_health(self) -> None:
        """Does nothing: no worker is there that could have died."""

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _execute(self, output: SchedulerOutput) -> None:
        start = time.perf_counter()
        if self._forward_s and not output.is_cleanup_only:
            time.sleep(self._forward_s)
        self._executed.append((output, start, time.perf_counter()))

    def _sample(self) -> ModelRunnerOutput:
        output, start, end = self._executed.popleft()
        sample_start = time.perf_counter()
        result = self._sampler(output)
        timing = WorkerTiming(start, end, sample_start, time.perf_counter())
        return ModelRunnerOutput(result.req_ids, result.req_id_to_index, result.sampled_token_ids, timing=timing)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
