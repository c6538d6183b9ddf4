"""Ranks as threads of this process: all of tensor parallelism but the processes, for tests of what it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from aioengine.checkpoint.files import ModelFiles
from aioengine.executor.base import Executor
from aioengine.executor.rank_messages import fingerprint
from aioengine.executor.uniproc import UniProcExecutor
from aioengine.resolved_config import ResolvedConfig
from aioengine.worker.worker import Worker


class Meeting:
    """Where the threads of a group lay down their parts of a sum."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.num_sums = 0


class ThreadGroup:
    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.parts[self.rank] = x
        meeting.barrier.wait()
        total = sum(meeting.parts[1:], meeting.parts[0])
        meeting.num_sums += self.rank == 0
        meeting.barrier.wait()  # all have read before any writes
        return x.copy_(total)


class ThreadRanks:
    """An `Executor` that gives every call to all of `size` workers."""

    def __init__(self, config: ResolvedConfig, files: ModelFiles) -> None:
        size = config.parallel.tensor_parallel_size
        self.meeting = Meeting(size)
        self.ranks = [self._start(config, files, ThreadGroup(rank, size, self.meeting)) for rank in range(size)]

    def _start(self, config: ResolvedConfig, files: ModelFiles, group: ThreadGroup) -> UniProcExecutor:
        return UniProcExecutor(config, worker_factory=lambda: Worker(config, files=files, group=group))

    def load_model(self) -> Future[None]:
        return self._all("load_model")

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        return self._all("determine_num_kv_cache_blocks", combine=min)

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        return self._all("initialize_kv_cache", num_blocks)

    def execute_model(self, scheduler_output: Any) -> Future[None]:
        return self._all("execute_model", scheduler_output)

    def sample_tokens(self, grammar_output: Any = None) -> Future[Any]:
        def same(answers: list[Any]) -> Any:
            assert len({fingerprint(answer) for answer in answers}) == 1, "the ranks sampled different tokens"
            return answers[0]

        return self._all("sample_tokens", grammar_output, combine=same)

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        return self._all("collective_rpc", method, *args, combine=lambda answers: [one for (one,) in answers])

    def check_health(self) -> None:
        for rank in self.ranks:
            rank.check_health()

    def shutdown(self) -> None:
        self.meeting.barrier.abort()
        for rank in self.ranks:
            rank.shutdown()

    def _all(self, method: str, *args: Any, combine: Callable[[list[Any]], Any] = lambda answers: answers[0]) -> Future[Any]:
        future: Future[Any] = Future()
        calls = [getattr(rank, method)(*args) for rank in self.ranks]
        lock, left = threading.Lock(), [len(calls)]

        def done(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            try:
                future.set_result(combine([call.result() for call in calls]))
            except BaseException as exc:
                future.set_exception(exc)

        for call in calls:
            call.add_done_callback(done)
        return future


def create_thread_ranks(config: ResolvedConfig, files: ModelFiles) -> Executor:
    """In the place of `startup._make_executor`."""
    return ThreadRanks(config, files)
