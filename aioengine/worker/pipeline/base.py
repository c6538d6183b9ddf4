"""The two ends of a step that differ between the host and a device: how its inputs are built, and how tokens are sampled.

`ModelRunner` is one for all devices. `create_pipeline` chooses once: `HostPipeline` works on the slot tables where they are;
`DevicePipeline` keeps copies of them on the device and waits for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from aioengine.attention.base import AttentionBatch
from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.outputs import TokenLogprobs
from aioengine.worker.input_batch import InputBatch, LongArray
from aioengine.worker.pipeline.async_output import Pending
from aioengine.worker.request_state import RequestStates


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The tokens of the requests that sampled in a step, in batch order."""

    token_ids: list[list[int]]  # [num_sampled]: one token each, more where draft tokens were accepted
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by place in `token_ids`, of those that asked
    failed: dict[int, str] = field(default_factory=dict)  # by place: why this request cannot be sampled for


@dataclass(frozen=True, slots=True)
class PaddedInputs:
    """A decode step of a fixed size in buffers that stay where they are, as a captured graph reads it."""

    input_ids: torch.Tensor  # [size] int64; padding 0
    positions: torch.Tensor  # [size] int64; padding 0
    attention: tuple[AttentionBatch, ...]  # of each KV-cache group; padding: one query token over nothing, whose key is not written


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
        logits: torch.Tensor,  # [num_rows, vocab_size] float32; overwritten
        batch: InputBatch,
        *,
        bitmasks: Mapping[int, bytes],  # by row: the tokens that a grammar allows
    ) -> SampledRows | Pending[SampledRows]:
        """One token for each row; afterwards the next step's `build_batch` may use it.

        Of a request with draft tokens, which has several rows, the tokens up to the first that differs from its draft token.
        """

    def takes_argmax(self, batch: InputBatch, *, bitmasks: Mapping[int, bytes]) -> bool:
        """Whether `keep_argmax` may stand for `sample`: every row's token is its largest logit's, and nothing else is wanted."""
        return False

    def keep_argmax(self, token_ids: torch.Tensor, batch: InputBatch) -> SampledRows | Pending[SampledRows]:
        """What `sample` gives for rows whose largest logits are those of token_ids [num_rows] int64. Only where `takes_argmax`."""
        raise NotImplementedError(f"{type(self).__name__} samples from logits")

    def sample_after_failure(
        self, failure: Exception, logits: torch.Tensor, batch: InputBatch, *, bitmasks: Mapping[int, bytes]
    ) -> SampledRows | Pending[SampledRows]:
        """`sample` raised `failure` and has changed nothing but its logits; here they are again. Find the requests that it was
        about, so that it fails them alone; or raise it, where requests cannot be told apart."""
        raise failure

    @abstractmethod
    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays as tensors on the device, by the same names, without waiting for it. The arrays must not change any more."""

    @abstractmethod
    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]] | Pending[list[npt.NDArray[Any]]]:
        """The tensors' values on the host, or what waits for them."""

    @abstractmethod
    def end_step(self, batch: InputBatch) -> None:
        """All work of this step has been enqueued."""

    def padded_inputs(self, size: int) -> PaddedInputs:
        """The buffers that hold a step of up to `size` requests with one token each. Only where graphs can be captured."""
        raise NotImplementedError(f"{type(self).__name__} builds every step in new memory")


def sampled_rows(batch: InputBatch, states: RequestStates) -> tuple[list[str], LongArray, LongArray]:
    """Of the rows that are sampled from: ids, slots [num_rows], and which output token each is to give [num_rows]."""
    rows = batch.sampled_np
    slots = batch.idx_mapping_np[rows]
    # From the batch, not from the tables: they may have moved on to a later step.
    output_indices = batch.row_seq_lens_np - states.num_prompt_tokens[slots]
    return [batch.req_ids[row] for row in rows.tolist()], slots, output_indices
