"""The seam between the engine and whatever runs the model: one worker thread here, ranks or remote workers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class GrammarOutput:
    """What the sampler needs from the host and is computed while the forward runs: token bitmasks by request."""

    bitmasks: dict[str, bytes]


T = TypeVar("T")


def hand_on(done: Future[T], future: Future[Any], *, deliver: Callable[[T], None]) -> None:
    """Cancel or fail `future` as `done` was, or `deliver` its result. In the thread that completes `done`: the worker's, or
    that of `shutdown` for a call that it cancels.
    """
    if done.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
    elif future.set_running_or_notify_cancel():
        error = done.exception()
        if error is not None:
            future.set_exception(error)
        else:
            deliver(done.result())


@runtime_checkable
class Executor(Protocol):
    """Runs steps in the order they are submitted (FIFO). No call blocks: results come through futures.

    A step is two calls, `execute_model` and then `sample_tokens`, so that what the sampler needs from the host is
    computed while the forward runs. Both raise through their futures; after a failed step the executor may be in any
    state, and the engine shuts it down.
    """

    def load_model(self) -> Future[None]:
        """Read the weights onto the device."""

    def determine_num_kv_cache_blocks(self) -> Future[int]:
        """How many KV blocks, the null block included, fit into the memory that the configuration allows."""

    def initialize_kv_cache(self, num_blocks: int) -> Future[None]:
        """Allocate the paged cache; block 0 is the null block."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[None]:
        """Apply the output to the worker's state and run the forward."""

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        """Sample from the logits of the oldest executed step that has not been sampled."""

    def collective_rpc(self, method: Callable[..., Any] | str, *args: Any) -> Future[list[Any]]:
        """Call a method of every worker by name, or a function with each worker as first argument; one result a worker."""

    def check_health(self) -> None:
        """Raise EngineDeadError if the workers cannot take another step."""

    def shutdown(self) -> None:
        """Stop the workers and free the device memory. Idempotent; pending futures are cancelled."""
