"""The same rows through the host's and through the device's sampler, with logits that tie and with every parameter."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aioengine.sampling_params import SamplingParams
from aioengine.worker.pipeline.staging import Staging
from aioengine.worker.pipeline.transfers import HostTransfers
from aioengine.worker.sample.device_sampler import sample_on_device, sampling_arrays, staged_sampling
from aioengine.worker.sample.sampler import sample
from aioengine.worker.sample.states import SamplingStates

EOS = 3
PROMPT_LEN = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one step; row i is the request in slot i."""

    logits: torch.Tensor  # [n, vocab_size] float32
    params: list[SamplingParams]
    output_indices: list[int]
    bitmasks: dict[int, bytes]
    token_table: torch.Tensor  # [n, longest] int32

    def __str__(self) -> str:
        return f"{self.params}, output indices {self.output_indices}, bitmasks of {sorted(self.bitmasks)}, {self.logits.tolist()}"


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    options: dict[str, Any] = {"seed": rng.getrandbits(64)}
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 1e-3, 0.5, 0.8, 1.0, 2.0],
        "top_k": [0, 1, 2, 5, vocab_size - 1, vocab_size],
        "top_p": [1.0, 0.97, 0.83, 0.51, 0.33, 0.07, 1e-4],
        "min_p": [0.0, 0.0, 0.013, 0.11, 1.0],
        "repetition_penalty": [1.0, 1.0, 1.3, 0.7],
        "frequency_penalty": [0.0, 0.0, 0.4],
        "presence_penalty": [0.0, 0.0, -0.6],
        "logit_bias": [{}, {}, {2: 1.5, vocab_size - 1: -3.0}],
        "bad_words_token_ids": [(), (), ((1,), (0, 2))],
        "allowed_token_ids": [None, None, [0, 1, EOS, vocab_size - 2]],
        "min_tokens": [0, 0, 5],
    }
    options |= {name: rng.choice(values) for name, values in choices.items()}
    return SamplingParams(**options)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    num_rows, vocab_size = rng.randint(1, 6), rng.choice([7, 40, 300, 5000])
    generator = torch.Generator().manual_seed(seed)
    if rng.random() < 0.5:  # logits of few values: the largest, and whatever is at a threshold, tie all the time
        logits = torch.randint(-3, 4, (num_rows, vocab_size), generator=generator).float()
    else:
        logits = torch.randn(num_rows, vocab_size, generator=generator) * rng.choice([0.1, 3.0, 9.0])
    indices = [rng.randint(0, 9) for _ in range(num_rows)]
    table = torch.randint(0, vocab_size, (num_rows, PROMPT_LEN + 10), generator=generator, dtype=torch.int32)
    masked = [row for row in range(num_rows) if rng.random() < 0.2]
    bitmasks = {row: bytes(rng.getrandbits(8) | 8 for _ in range(-(-vocab_size // 8))) for row in masked}  # EOS is allowed
    return Case(logits, [random_params(rng, vocab_size) for _ in range(num_rows)], indices, bitmasks, table)


def both_samplers(case: Case) -> tuple[list[int], list[int]]:
    """The tokens of the host's and of the device's sampler."""
    num_rows, vocab_size = case.logits.shape
    states = SamplingStates(max_num_reqs=num_rows, vocab_size=vocab_size, eos_token_ids=frozenset({EOS}))
    for slot, params in enumerate(case.params):
        states.set(slot, params, num_prompt_tokens=PROMPT_LEN)
    slots = np.arange(num_rows)
    batch = states.gather(slots, np.asarray(case.output_indices, dtype=np.int64))
    host = sample(case.logits.clone(), batch, bitmasks=case.bitmasks, token_table=case.token_table)
    sent = Staging(HostTransfers()).stage(sampling_arrays(batch, slots, vocab_size=vocab_size))
    bits = np.array([np.frombuffer(mask, dtype=np.uint8) for mask in case.bitmasks.values()])
    device = sample_on_device(
        case.logits.clone(),
        staged_sampling(sent.groups, batch, token_table=case.token_table),
        last_sampled_tokens=torch.zeros(num_rows, dtype=torch.int32),
        allowed=(torch.tensor(list(case.bitmasks)), torch.from_numpy(bits)) if case.bitmasks else None,
        eos_token_ids=torch.from_numpy(states.eos_token_ids),
    )
    failed = set(host.failed)
    assert failed == {row for row, best in enumerate(device.best.tolist()) if not np.isfinite(best)}, case
    pairs = zip(host.token_ids.tolist(), device.token_ids.tolist(), strict=True)
    kept = [pair for row, pair in enumerate(pairs) if row not in failed]
    return [token for token, _ in kept], [token for _, token in kept]
