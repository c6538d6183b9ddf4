from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.outputs import Logprob
from aioengine.sampling_params import SamplingParams
from aioengine.worker.sample.sampler import SamplerOutput, sample
from aioengine.worker.sample.states import SamplingStates
from aioengine_kernels.inverse_cdf import inverse_cdf

EOS = frozenset({3, 9})


def run(
    logits: torch.Tensor, params: list[SamplingParams], *, output_indices: list[int] | None = None, bitmasks: dict[int, bytes] | None = None
) -> SamplerOutput:
    """Sample one row a `SamplingParams`, through the slot tables, in slots that are not the rows' numbers."""
    states = SamplingStates(max_num_reqs=len(params) + 3, vocab_size=logits.shape[1], eos_token_ids=EOS)
    slots = np.arange(len(params), dtype=np.int64)[::-1] + 2
    for slot, p in zip(slots.tolist(), params, strict=True):
        states.set(slot, p)
    indices = np.asarray(output_indices or [0] * len(params), dtype=np.int64)
    return sample(logits.clone(), states.gather(slots, indices), bitmasks=bitmasks)


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 0, **options})


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, -1.0, 0.0, 1.0]])
    assert run(logits, [params(temperature=0)] * 2).token_ids.tolist() == [1, 0]


def test_a_greedy_row_among_random_ones() -> None:
    logits = random_logits(5, 500)
    mixed = [params(temperature=1.0, seed=i) for i in range(5)]
    mixed[2] = params(temperature=0)
    tokens = run(logits, mixed).token_ids
    assert tokens[2] == logits[2].argmax()
    assert tokens[[0, 1, 3, 4]].tolist() == run(logits[[0, 1, 3, 4]], mixed[:2] + mixed[3:]).token_ids.tolist()


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30, 1e36])
def test_tiny_temperatures_give_the_largest_logit_and_no_nan_beside_greedy_and_random_rows(scale: float) -> None:
    """Whatever the size of the logits: dividing by the temperature overflows nothing."""
    logits = random_logits(6, 300).clamp(-9, 9) / 10 * scale
    temperatures = [0.0, 1e-6, 1e-5, 1e-4, 1e-2, 1.0]
    output = run(logits, [params(temperature=temperature, logprobs=2) for temperature in temperatures])
    assert output.token_ids[:3].tolist() == logits[:3].argmax(-1).tolist()
    alone = [run(logits[row : row + 1], [params(temperature=t, logprobs=2)]).token_ids.item() for row, t in enumerate(temperatures)]
    assert output.token_ids.tolist() == alone
    if scale > 1:
        assert output.token_ids.tolist() == logits.argmax(-1).tolist(), "nothing else has any weight"


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.9, "top_k": 200, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1, "logprobs": 3},
    {"temperature": 2.0, "top_p": 0.999},
    {"temperature": 0.01, "logprobs": 20},
    {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": (5,)},
]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [257, 32003, 49152])
def test_a_row_does_not_depend_on_its_batch_mates(vocab_size: int, num_threads: int) -> None:
    """Bit for bit: every row alone, in a batch of 17, and in that batch turned round."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = random_logits(17, vocab_size)
        options = [params(**{**MIXED[i % len(MIXED)], "seed": 100 + i}) for i in range(17)]
        indices = [i // 2 for i in range(17)]
        together = run(logits, options, output_indices=indices)
        turned = run(logits.flip(0), options[::-1], output_indices=indices[::-1])
        assert together.token_ids.tolist() == turned.token_ids.flip(0).tolist()
        for i in range(17):
            alone = run(logits[i : i + 1], [options[i]], output_indices=[indices[i]])
            assert alone.token_ids.tolist() == [together.token_ids[i]]
            assert alone.logprobs.get(0) == together.logprobs.get(i)
            assert turned.logprobs.get(16 - i) == together.logprobs.get(i)
    finally:
        torch.set_num_threads(before)


def test_seed_and_output_index_choose_the_number() -> None:
    logits = random_logits(1, 1000).expand(40, 1000) / 10
    same = run(logits, [params(seed=5)] * 40).token_ids
    assert len(set(same.tolist())) == 1
    by_index = run(logits, [params(seed=5)] * 40, output_indices=list(range(40))).token_ids
    by_seed = run(logits, [params(seed=i) for i in range(40)]).token_ids
    assert len(set(by_index.tolist())) > 30
    assert len(set(by_seed.tolist())) > 30


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.6, "min_p": 0.05}],
    ids=str,
)
def test_empirical_distribution(options: dict[str, Any]) -> None:
    """20000 tokens of one request against the distribution that the parameters define, computed in float64."""
    count, vocab_size = 20_000, 24
    logits = random_logits(1, vocab_size, seed=4) / 2
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    expected = (logits[0].double() / p["temperature"]).softmax(-1)
    expected[expected < p["min_p"] * expected.max()] = 0
    order = expected.argsort(descending=True)
    if p["top_k"]:
        expected[order[p["top_k"] :]] = 0
    expected /= expected.sum()
    if p["top_p"] < 1:
        expected[order[(expected[order].cumsum(0) < p["top_p"]).sum() + 1 :]] = 0
        expected /= expected.sum()

    batch = [params(**options, seed=11)] * count
    tokens = run(logits.expand(count, vocab_size), batch, output_indices=list(range(count))).token_ids
    observed = tokens.bincount(minlength=vocab_size)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed[possible] - count * expected[possible]) ** 2 / (count * expected[possible])).sum().item()
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 8  # mean + 4 sigma, and room for few degrees


def test_inverse_cdf_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.0]]).expand(4, 5)
    numbers = torch.tensor([0.0, 1 / 3 - 1e-9, 1 / 3 + 1e-9, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(weights, numbers).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 4}, {"top_k": 2000, "top_p": 0.9}, {"min_p": 0.2}], ids=str
)
def test_nan_logits_give_a_valid_id_and_leave_the_others_alone(options: dict[str, Any]) -> None:
    logits = random_logits(3, 3000)
    expected = run(logits, [params(seed=i, **options) for i in range(3)]).token_ids
    logits[1] = math.nan
    tokens = run(logits, [params(seed=i, **options) for i in range(3)]).token_ids
    assert 0 <= tokens[1] < 3000
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


# ------------------------------------------------------------------ min_tokens
@pytest.mark.parametrize("ending", [3, 9, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_min_tokens_masks_eos_and_stop_ids_until_reached(ending: int, temperature: float) -> None:
    logits = torch.zeros(3, 12)
    logits[:, ending] = 50.0
    logits[:, 7] = 20.0
    p = params(temperature=temperature, min_tokens=2, stop_token_ids=(5, 4000))  # 4000 is not in the vocabulary
    assert run(logits, [p] * 3, output_indices=[0, 1, 2]).token_ids.tolist() == [7, 7, ending]


def test_stop_ids_of_one_request_are_not_masked_for_another() -> None:
    logits = torch.zeros(2, 12)
    logits[:, 5] = 50.0
    both = [params(temperature=0, min_tokens=2, stop_token_ids=(5,)), params(temperature=0, min_tokens=2)]
    assert run(logits, both).token_ids.tolist() == [0, 5]


def test_a_slot_does_not_remember_its_previous_request() -> None:
    states = SamplingStates(max_num_reqs=1, vocab_size=12, eos_token_ids=EOS)
    slot = np.zeros(1, dtype=np.int64)
    states.set(0, params(temperature=0.5, top_k=3, top_p=0.5, min_p=0.5, min_tokens=4, logprobs=2, seed=9))
    states.set(0, params(temperature=0))
    batch = states.gather(slot, slot)
    assert (batch.temperature[0], batch.top_k[0], batch.top_p[0], batch.log_min_p[0]) == (0, 0, 1, -math.inf)
    assert (batch.num_logprobs[0], batch.seeds[0], batch.ending_token_ids) == (-1, 0, {})


def test_seeds_use_all_64_bits() -> None:
    states = SamplingStates(max_num_reqs=1, vocab_size=12, eos_token_ids=EOS)
    states.set(0, params(seed=2**64 - 1))
    assert int(states.seeds[0]) == 2**64 - 1


# ------------------------------------------------------------------ logprobs
def test_logprobs_are_raw_ranked_and_start_with_the_sampled_token() -> None:
    logits = random_logits(2, 300)
    logits[:, 3] = 100.0  # eos: masked by min_tokens, but its raw probability is about 1
    output = run(logits, [params(temperature=5.0, min_tokens=1, logprobs=4, seed=3), params(temperature=0)])
    assert list(output.logprobs) == [0]
    entry = output.logprobs[0]
    token = int(output.token_ids[0])
    raw = logits[0].log_softmax(-1)
    order = raw.argsort(descending=True).tolist()
    assert next(iter(entry)) == token
    assert entry[token] == Logprob(raw[token].item(), order.index(token) + 1)
    others = [t for t in entry if t != token]
    assert others == [t for t in order[:4] if t != token]
    assert [entry[t].rank for t in others] == [order.index(t) + 1 for t in others]
    assert entry[3].rank == 1


def test_logprobs_zero_reports_the_sampled_token_only() -> None:
    output = run(random_logits(1, 50), [params(temperature=0, logprobs=0)])
    token = int(output.token_ids[0])
    assert list(output.logprobs[0]) == [token]
    assert output.logprobs[0][token].rank == 1


def test_logprobs_of_a_vocabulary_smaller_than_asked_for() -> None:
    assert len(run(random_logits(1, 12), [params(temperature=0, logprobs=20)]).logprobs[0]) == 12


# ------------------------------------------------------------------ grammar
def test_bitmask_restricts_one_row() -> None:
    logits = random_logits(2, 12)
    allowed = np.zeros(16, dtype=np.uint8)
    allowed[[2, 11]] = 1
    mask = np.packbits(allowed, bitorder="little").tobytes()
    output = run(logits, [params(temperature=0, logprobs=0)] * 2, bitmasks={0: mask})
    assert output.token_ids[0] == (2 if logits[0, 2] > logits[0, 11] else 11)
    assert output.token_ids[1] == logits[1].argmax()
    with pytest.raises(ValueError, match="1 bytes does not cover 12 tokens"):
        run(logits, [params()] * 2, bitmasks={1: b"\xff"})
