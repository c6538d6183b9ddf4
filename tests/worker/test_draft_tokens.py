"""Rows of a request with draft tokens: each sees the draft tokens before it, and tokens count until one differs from its draft token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.core.scheduler_output import CachedRequestData, SchedulerOutput
from aioengine.kv_cache_groups import KVCacheGroup
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams
from aioengine.worker.block_table import BlockTables
from aioengine.worker.device import CpuDevice, InterpreterDevice
from aioengine.worker.input_batch import InputBatch
from aioengine.worker.pipeline.base import SampledRows
from aioengine.worker.pipeline.create import create_pipeline
from aioengine.worker.pipeline.host import HostPipeline
from aioengine.worker.request_state import RequestStates

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46]

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"min_tokens": 3, "temperature": 0.8},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0, "bad_words_token_ids": ((9,), (46, 46), (5, 3, 5))},
    {"allowed_token_ids": [1, 2, 3, 30, 31], "frequency_penalty": 1.0, "bad_words_token_ids": ((1, 2), (2, 1), (3, 3))},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.5},
]


class DraftStep:
    """A host pipeline and one step, of which request i has `draft_token_ids[i]` behind its last known token."""

    def __init__(self, requests: list[tuple[list[int], list[int], dict[str, Any]]], draft_token_ids: list[list[int]]) -> None:
        self.states = RequestStates(max_num_reqs=len(requests) + 1, max_model_len=64, vocab_size=61, eos_token_ids=frozenset({7}))
        self.states.add("somebody", [1], SamplingParams(seed=0))
        for number, (prompt, output, options) in enumerate(requests):
            slot = self.states.add(f"r{number}", prompt, SamplingParams(**{"seed": 9, "temperature": 0, **options}))
            known = prompt + output
            self.states.write_history(slot, known + draft_token_ids[number])
            self.states.num_known_tokens[slot] = len(known)
        block_tables = BlockTables([KVCacheGroup((0,))], max_num_reqs=len(requests) + 1, max_model_len=64, block_size=4)
        self.pipeline = HostPipeline(states=self.states, block_tables=block_tables, device=CpuDevice(num_threads=None))
        lens = [len(prompt) + len(output) for prompt, output, _ in requests]
        rows = [(number, lens[number] + j) for number, some in enumerate(draft_token_ids) for j in range(len(some) + 1)]
        nothing = torch.zeros(0, dtype=torch.int64)
        self.batch = InputBatch(
            req_ids=[f"r{number}" for number in range(len(requests))],
            num_reqs=len(requests),
            num_tokens=len(rows),
            max_query_len=1,
            max_seq_len=64,
            idx_mapping_np=np.arange(len(requests), dtype=np.int64) + 1,
            query_start_loc=nothing,
            query_start_loc_np=np.zeros(0, dtype=np.int32),
            seq_lens=nothing,
            seq_lens_np=np.asarray([length + len(some) for length, some in zip(lens, draft_token_ids, strict=True)], dtype=np.int32),
            input_ids=nothing,
            positions=nothing,
            groups=(),
            logits_indices=nothing,
            sampled_np=np.asarray([number for number, _ in rows], dtype=np.int64),
            row_seq_lens_np=np.asarray([length for _, length in rows], dtype=np.int64),
        )

    def run(self, logits: torch.Tensor) -> SampledRows:
        return self.pipeline.sample(logits.clone(), self.batch, bitmasks={})

    def known(self, req_id: str) -> list[int]:
        slot = self.states.slot_of(req_id)
        tokens: list[int] = self.states.token_ids[slot, : self.states.num_known_tokens[slot]].tolist()
        return tokens


def peaks(*tokens: int) -> torch.Tensor:
    logits = torch.zeros(len(tokens), 61)
    logits[range(len(tokens)), list(tokens)] = 5.0
    return logits


def test_draft_tokens_are_kept_while_they_are_what_is_sampled() -> None:
    step = DraftStep([([1, 2], [3], {}), ([4], [], {}), ([5], [6], {"logprobs": 1})], [[10, 11, 12], [], [20, 21]])
    rows = step.run(peaks(10, 11, 30, 31, 40, 20, 21, 22))
    assert rows.token_ids == [[10, 11, 30], [40], [20, 21, 22]]
    assert [next(iter(entry)) for entry in rows.logprobs[2]] == [20, 21, 22]
    assert list(rows.logprobs) == [2]
    assert step.known("r0") == [1, 2, 3, 10, 11, 30]
    assert step.known("r1") == [4, 40]
    assert step.known("r2") == [5, 6, 20, 21, 22]


@pytest.mark.parametrize("options", PARAMETERS, ids=lambda options: "+".join(options) or "plain")
def test_accepted_tokens_are_those_of_one_row_a_step(options: dict[str, Any]) -> None:
    """Every row sees the draft tokens before it: penalties, bad words, min_tokens and the random number are those of its position."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 61, generator=generator) * 2
    plain: list[int] = []
    for j in range(5):
        step = DraftStep([(PROMPT, plain.copy(), options)], [[]])
        plain += step.run(logits[j : j + 1]).token_ids[0]
    for right in range(5):
        draft_token_ids = [*plain[:right], *([(plain[right] + 1) % 61, 4, 4][: 4 - right])]
        step = DraftStep([(PROMPT, [], options)], [draft_token_ids])
        assert step.run(logits[: len(draft_token_ids) + 1]).token_ids == [plain[: right + 1]]


def test_nan_behind_a_rejected_draft_token_fails_nobody() -> None:
    logits = peaks(10, 30, 12)
    logits[2] = torch.nan
    request: tuple[list[int], list[int], dict[str, Any]] = ([1, 2], [3], {})
    assert DraftStep([request], [[10, 11]]).run(logits).failed == {}
    failed = DraftStep([request], [[10, 30]]).run(logits).failed
    assert list(failed) == [0]


def test_who_lost_its_slot_meanwhile_gets_no_tokens() -> None:
    step = DraftStep([([1, 2], [3], {})], [[10]])
    step.states.preempt("r0")
    slot = step.states.add("new", [8, 8, 8, 8], SamplingParams(seed=0))
    assert slot == 1
    step.run(peaks(10, 11))
    assert step.known("new") == [8, 8, 8, 8]


def test_a_device_refuses_draft_tokens(make_config: Callable[..., ResolvedConfig]) -> None:
    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=9, eos_token_ids=frozenset())
    table = BlockTables([KVCacheGroup((0,))], max_num_reqs=1, max_model_len=8, block_size=4)
    pipeline = create_pipeline(InterpreterDevice(num_threads=None), make_config(), states=states, block_tables=table)
    out = SchedulerOutput(1, [], CachedRequestData(), {"r": 3}, 3, scheduled_spec_decode_tokens={"r": [1, 2]})
    with pytest.raises(RuntimeError, match="draft tokens can be checked on the CPU only"):
        pipeline.build_batch(out)
