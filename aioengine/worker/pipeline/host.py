"""Steps built and sampled on the host, where the slot tables are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.printable import get_logger
from aioengine.resolved_config import LogprobsMode
from aioengine.worker.block_table import BlockTables
from aioengine.worker.device import Device
from aioengine.worker.input_batch import InputBatch, LongArray, build_input_batch
from aioengine.worker.pipeline.base import SampledRows, StepPipeline, sampled_rows
from aioengine.worker.request_state import RequestStates
from aioengine.worker.sample.draft_tokens import accept_draft_tokens
from aioengine.worker.sample.logits_processor import LoadedProcessor, ProcessorRow
from aioengine.worker.sample.sampler import RowProcessors, SamplerOutput, sample

logger = get_logger(__name__)


class HostPipeline(StepPipeline):
    """Builds and samples where the slot tables are; `sample` waits for the tokens."""

    def __init__(
        self,
        *,
        states: RequestStates,
        block_tables: BlockTables,
        device: Device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        processors: Sequence[LoadedProcessor] = (),
    ) -> None:
        self._states = states
        self._block_tables = block_tables
        self._device = device
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._processors = processors

    def build_batch(self, out: SchedulerOutput) -> InputBatch:
        return build_input_batch(out, states=self._states, block_tables=self._block_tables, device=self._device)

    def sample(self, logits: torch.Tensor, batch: InputBatch, *, bitmasks: Mapping[int, bytes]) -> SampledRows:
        req_ids, slots, output_indices = sampled_rows(batch, self._states)
        output = self._sample(logits, slots, output_indices, bitmasks, self._processor_rows(req_ids, slots, batch))
        return self._keep(batch, req_ids, slots, output)

    def takes_argmax(self, batch: InputBatch, *, bitmasks: Mapping[int, bytes]) -> bool:
        if bitmasks or self._processors:
            return False
        _, slots, output_indices = sampled_rows(batch, self._states)
        return self._states.sampling.take_argmax(slots, output_indices)

    def keep_argmax(self, token_ids: torch.Tensor, batch: InputBatch) -> SampledRows:
        req_ids, slots, _ = sampled_rows(batch, self._states)
        return self._keep(batch, req_ids, slots, SamplerOutput(token_ids))

    def sample_after_failure(
        self, failure: Exception, logits: torch.Tensor, batch: InputBatch, *, bitmasks: Mapping[int, bytes]
    ) -> SampledRows:
        """Row by row: a row's token depends on nothing but the row, so those that can be sampled get what they would have got."""
        req_ids, slots, output_indices = sampled_rows(batch, self._states)
        rows = self._processor_rows(req_ids, slots, batch)
        output = SamplerOutput(torch.zeros(len(req_ids), dtype=torch.int64))
        for i, req_id in enumerate(req_ids):
            bitmask = {0: bitmasks[i]} if i in bitmasks else {}
            one = slice(i, i + 1)
            try:
                alone = self._sample(logits[one].clone(), slots[one], output_indices[one], bitmask, rows[one])
            except Exception as exc:
                logger.warning("request %r cannot be sampled for", req_id, exc_info=exc)
                output.failed[i] = f"no token could be sampled: {type(exc).__name__}: {exc}"
                continue
            output.token_ids[one] = alone.token_ids
            if 0 in alone.logprobs:
                output.logprobs[i] = alone.logprobs[0]
            if 0 in alone.failed:
                output.failed[i] = alone.failed[0]
        return self._keep(batch, req_ids, slots, output)

    def _sample(
        self,
        logits: torch.Tensor,  # [n, vocab_size]; overwritten
        slots: LongArray,  # [n]
        output_indices: LongArray,  # [n]
        bitmasks: Mapping[int, bytes],
        rows: list[ProcessorRow],  # [n], or none without processors
    ) -> SamplerOutput:
        return sample(
            logits,
            self._states.sampling.gather(slots, output_indices),
            bitmasks=bitmasks,
            token_table=self._states.token_ids_tensor,
            processors=RowProcessors(self._processors, rows) if self._processors else None,
            logprobs_mode=self._logprobs_mode,
        )

    def _keep(self, batch: InputBatch, req_ids: list[str], slots: LongArray, output: SamplerOutput) -> SampledRows:
        """Write the tokens to the tables, for the next step to read."""
        token_ids = self._device.to_host(output.token_ids)
        if (batch.sampled_np[1:] == batch.sampled_np[:-1]).any():
            return self._accept(batch, req_ids, slots, token_ids, output)
        self._states.append_sampled(req_ids, slots, token_ids)
        return SampledRows([[token] for token in token_ids.tolist()], {row: [e] for row, e in output.logprobs.items()}, output.failed)

    def _accept(
        self,
        batch: InputBatch,
        req_ids: list[str],  # [num_rows]
        slots: LongArray,  # [num_rows]
        token_ids: LongArray,  # [num_rows]
        output: SamplerOutput,
    ) -> SampledRows:
        """Compare what was sampled with the draft tokens, which stand in the token table behind the known tokens."""
        states, rows = self._states, SampledRows([])
        ends = [*((np.diff(batch.sampled_np) != 0).nonzero()[0] + 1).tolist(), len(token_ids)]
        start = 0
        for place, end in enumerate(ends):
            slot, known = int(slots[start]), int(batch.row_seq_lens_np[start])
            draft_token_ids = states.token_ids[slot, known : known + end - start - 1]
            accepted = accept_draft_tokens(token_ids[start:end].tolist(), draft_token_ids.tolist())
            states.append_accepted(req_ids[start], slot, accepted)
            rows.token_ids.append(accepted)
            counted = range(start, start + len(accepted))
            if start in output.logprobs:
                rows.logprobs[place] = [output.logprobs[row] for row in counted]
            if (failed := next((row for row in counted if row in output.failed), None)) is not None:
                rows.failed[place] = output.failed[failed]
            start = end
        return rows

    def _processor_rows(self, req_ids: list[str], slots: LongArray, batch: InputBatch) -> list[ProcessorRow]:
        if not self._processors:
            return []
        table = self._states.token_ids.view()
        table.flags.writeable = False
        num_prompt_tokens = self._states.num_prompt_tokens[slots].tolist()
        return [
            ProcessorRow(req_id, self._states.sampling_params(req_id), table[slot, :num_prompt], table[slot, num_prompt:seq_len])
            for req_id, slot, num_prompt, seq_len in zip(
                req_ids, slots.tolist(), num_prompt_tokens, batch.row_seq_lens_np.tolist(), strict=True
            )
        ]

    def upload(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        return {name: self._device.to_device(array) for name, array in arrays.items()}

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        return [self._device.to_host(tensor) for tensor in tensors]

    def end_step(self, batch: InputBatch) -> None:
        """The step is over: nothing is kept of it."""
