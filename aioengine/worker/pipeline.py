"""The two ends of a step that differ between the host and a device: how its inputs are built, and how tokens are sampled.

`ModelRunner` is one for all devices. A `StepPipeline` is chosen once by the `Device`: `HostPipeline` works on the slot tables
where they are; `DevicePipeline` keeps copies of them on the device and waits for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import TokenLogprobs
from aioengine.worker.async_output import Pending
from aioengine.worker.block_table import BlockTable
from aioengine.worker.device import Device
from aioengine.worker.input_batch import InputBatch, LongArray, build_input_batch
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.sampler import sample


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of the requests that sampled in a step, in batch order."""

    token_ids: list[int]  # [num_sampled]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place in `token_ids`, of those that asked


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """A decode step of a fixed size in buffers that stay where they are, as a captured graph reads it."""

    input_ids: torch.Tensor  # [size] int64; padding 0
    positions: torch.Tensor  # [size] int64; padding 0
    attention: AttentionBatch  # padding: one query token over nothing, whose key is not written


class StepPipeline(ABC):
    """Called in the worker's thread: `build_batch`, then `sample` if a request samples, then `end_step`, for each step.

    `build_batch` of the next step may come before `sample` of this one if it needs none of its tokens.
    """

    @abstractmethod
    def build_batch(self, out: SchedulerOutput) -> InputBatch:
        """The model's input of a step with scheduled tokens. The tables hold what `out` said. Raises what `plan_step` raises."""

    @abstractmethod
    def sample(
        self,
        logits: torch.Tensor,  # [num_sampled, vocab_size] float32; overwritten
        batch: InputBatch,
        *,
        bitmasks: Mapping[int, bytes],  # by row: the tokens that a grammar allows
    ) -> SampledRows | Pending[SampledRows]:
        """One token for each row; afterwards the next step's `build_batch` may use it."""

    @abstractmethod
    def end_step(self, batch: InputBatch) -> None:
        """All work of this step has been enqueued."""

    def padded_inputs(self, size: int) -> PaddedInputs:
        """The buffers that hold a step of up to `size` requests with one token each. Only where graphs can be captured."""
        raise NotImplementedError(f"{type(self).__name__} builds every step in new memory")


class HostPipeline(StepPipeline):
    """Builds and samples where the slot tables are; `sample` waits for the tokens."""

    def __init__(self, *, states: RequestStates, block_table: BlockTable, device: Device) -> None:
        self._states = states
        self._block_table = block_table
        self._device = device

    def build_batch(self, out: SchedulerOutput) -> InputBatch:
        return build_input_batch(out, states=self._states, block_table=self._block_table, device=self._device)

    def sample(self, logits: torch.Tensor, batch: InputBatch, *, bitmasks: Mapping[int, bytes]) -> SampledRows:
        req_ids, slots, output_indices = sampled_rows(batch, self._states)
        output = sample(logits, self._states.sampling.gather(slots, output_indices), bitmasks=bitmasks)
        token_ids = self._device.to_host(output.token_ids)
        self._states.append_sampled(req_ids, slots, token_ids)
        return SampledRows(token_ids.tolist(), output.logprobs)

    def end_step(self, batch: InputBatch) -> None:
        """The step is over: nothing is kept of it."""


def sampled_rows(batch: InputBatch, states: RequestStates) -> tuple[list[str], LongArray, LongArray]:
    """Of the requests that sample: ids, slots [num_sampled], and which output token each is about to get [num_sampled]."""
    rows = batch.sampled_np
    slots = batch.idx_mapping_np[rows]
    # From the batch, not from the tables: they may have moved on to a later step.
    output_indices = batch.seq_lens_np[rows].astype(np.int64) - states.num_prompt_tokens[slots]
    return [batch.req_ids[row] for row in rows.tolist()], slots, output_indices
