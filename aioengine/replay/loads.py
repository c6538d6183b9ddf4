"""Gives blocks that a recorded engine loaded from its KV connector their content: by computing it.

What was loaded had been computed from the same tokens, by the same weights and instructions. So the bits are the same, and a
recording runs again without the store that it ran with.
"""

from __future__ import annotations

from aioengine.core.scheduler_output import CachedRequestData, KVLoad, NewRequestData, SchedulerOutput
from aioengine.errors import ConfigError
from aioengine.events.step_event import RequestInfo, StepEvent, StepResultEvent
from aioengine.executor.base import Executor
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams

_NOTHING = CachedRequestData()
_REQ_ID = "load\0"  # no user's request has a name with a NUL in it


class LoadReplay:
    """Takes every event of a recording before its step is executed."""

    def __init__(self, executor: Executor, config: ResolvedConfig) -> None:
        self._executor = executor
        self._block_size = config.cache.block_size
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._requests: dict[str, RequestInfo] = {}  # those that may load
        self._loads: dict[str, KVLoad] = {}  # begun and not done

    def take(self, event: StepEvent | StepResultEvent) -> None:
        """Raises ConfigError if the recording does not tell what a load was of."""
        for info in event.added:
            if info.num_external_blocks and info.prompt_token_ids is not None:
                self._requests[info.request_id] = info
        for done in event.loaded:
            load, asked = self._loads.pop(done.request_id, None), self._requests.pop(done.request_id, None)
            if load is None or asked is None:
                raise ConfigError(f"the recording does not tell what blocks request {done.request_id!r} loaded")
            self._compute(load, asked, num_blocks=done.num_blocks)
        if isinstance(event, StepEvent) and event.output.kv_connector_metadata is not None:
            self._loads.update((load.req_id, load) for load in event.output.kv_connector_metadata.loads)

    def _compute(self, load: KVLoad, info: RequestInfo, *, num_blocks: int) -> None:
        """A request that computes these tokens and ends before it samples: at least one token of the prompt is left out."""
        start = len(load.computed_block_ids) * self._block_size
        end = start + num_blocks * self._block_size
        table = [*load.computed_block_ids, *load.block_ids]
        token_ids = info.prompt_token_ids
        assert token_ids is not None, "it was looked at when the request came"
        while start < end:
            num_tokens = min(end - start, self._max_num_batched_tokens)
            new = NewRequestData(
                _REQ_ID, token_ids, SamplingParams(temperature=0.0, max_tokens=1, seed=0), (table,), start, lora_name=info.lora_name
            )
            self._step(SchedulerOutput(0, [new], _NOTHING, {_REQ_ID: num_tokens}, num_tokens))
            self._step(SchedulerOutput(0, [], _NOTHING, {}, 0, finished_req_ids=frozenset({_REQ_ID})))
            start += num_tokens

    def _step(self, output: SchedulerOutput) -> None:
        executed, sampled = self._executor.execute_model(output), self._executor.sample_tokens()
        executed.result()
        sampled.result()
