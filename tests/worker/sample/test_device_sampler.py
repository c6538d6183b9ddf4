"""The device's sampler where logits are no numbers. The kernels are their references here; tests/kernels has them by themselves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.resolved_config import LogprobsMode
from aioengine.sampling_params import SamplingParams
from aioengine.worker.pipeline.base import SampledRows
from aioengine.worker.pipeline.device import _PendingRows
from aioengine.worker.pipeline.staging import Staging
from aioengine.worker.pipeline.transfers import HostTransfers
from aioengine.worker.sample.device_sampler import DeviceSamples, sample_on_device, sampling_arrays, staged_sampling
from aioengine.worker.sample.sampler import NAN_LOGITS, NOTHING_ALLOWED
from aioengine.worker.sample.states import SamplingStates

VOCAB_SIZE = 29
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 6, "top_p": 0.8, "min_p": 0.01, "temperature": 1.4},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "bias and bad words": {"logit_bias": {4: 1.0}, "bad_words_token_ids": ((9,), (1, 2))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [8]},
    "logprobs": {"logprobs": 3},
    "grammar": {},
}
BAD = {
    "one NaN": lambda row: row.index_fill_(0, torch.tensor([7]), math.nan),
    "all NaN": lambda row: row.fill_(math.nan),
    "one inf": lambda row: row.index_fill_(0, torch.tensor([7]), math.inf),
    "inf and -inf": lambda row: row.index_copy_(0, torch.tensor([7, 8]), torch.tensor([math.inf, -math.inf])),
    "NaN where the grammar forbids": lambda row: row.index_fill_(0, torch.tensor([20]), math.nan),
    "all -inf": lambda row: row.fill_(-math.inf),
}
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")


def run(logits: torch.Tensor, options: dict[str, Any], *, mode: LogprobsMode, has_grammar: bool) -> tuple[DeviceSamples, SampledRows]:
    """Three equal requests; a grammar allows the second one the tokens below 16."""
    states = SamplingStates(max_num_reqs=3, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({3}))
    for slot in range(3):
        states.set(slot, SamplingParams(**{"seed": slot, **options}), num_prompt_tokens=2)
    slots, table = np.arange(3), torch.tensor([[1, 2, 0, 0]] * 3, dtype=torch.int32)
    batch = states.gather(slots, np.zeros(3, dtype=np.int64))
    sent = Staging(HostTransfers()).stage(sampling_arrays(batch, slots, vocab_size=VOCAB_SIZE))
    staged = staged_sampling(sent.groups, batch, token_table=table)
    bits = torch.tensor([[255, 255, 0, 0]], dtype=torch.uint8)
    samples = sample_on_device(
        logits.clone(),
        staged,
        last_sampled_tokens=torch.zeros(3, dtype=torch.int32),
        allowed=(torch.tensor([1]), bits) if has_grammar else None,
        logprobs_mode=mode,
    )
    download = HostTransfers().download(samples.tensors())
    return samples, _PendingRows(download, staged.logprob_rows_np.tolist(), staged.num_logprobs, {}).wait()


@pytest.mark.parametrize(("bad", "mode"), list(itertools.product(BAD, MODES)))
@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_that_is_no_logits_fails_alone(name: str, bad: str, mode: LogprobsMode) -> None:
    options, has_grammar = OPTIONS[name], name == "grammar"
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    healthy, expected = run(logits, options, mode=mode, has_grammar=has_grammar)
    assert expected.failed == {}
    BAD[bad](logits[1])
    samples, rows = run(logits, options, mode=mode, has_grammar=has_grammar)
    assert rows.failed == {1: NOTHING_ALLOWED if bad == "all -inf" else NAN_LOGITS}
    assert 0 <= rows.token_ids[1][0] < VOCAB_SIZE, "it is looked up in the next step"
    for ours, theirs in zip(samples.tensors(), healthy.tensors(), strict=True):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
