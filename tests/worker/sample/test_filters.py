"""top_k, top_p and min_p keep the same tokens as transformers' logits warpers, and ties are cut by token id."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.worker.sample.filters import apply_min_p, apply_temperature
from aioengine.worker.sample.top_k_top_p import keep_top_k_top_p

NO_IDS = torch.LongTensor([[0]])


def random_logits(rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def kept(logits: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """The kept tokens as a mask; checks that ids ascend, that weights are theirs, and that each row comes once."""
    num_rows, vocab_size = logits.shape
    probs = logits.softmax(-1)
    mask = torch.zeros(num_rows, vocab_size, dtype=torch.bool)
    seen: list[int] = []
    groups = keep_top_k_top_p(logits, probs, top_k=torch.tensor(top_k), top_p=torch.tensor(top_p, dtype=torch.float64))
    for group in groups:
        for row, token_ids, weights in zip(group.rows.tolist(), group.token_ids, group.weights, strict=True):
            assert (token_ids[token_ids < vocab_size].diff() > 0).all()
            ids = token_ids[weights > 0]
            assert torch.equal(weights[weights > 0], probs[row, ids])
            mask[row, ids] = True
            seen.append(row)
    assert sorted(seen) == list(range(num_rows))
    return mask


def warped(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The finite entries after transformers' warpers, in their order: top_k, then top_p; in float64."""
    logits = logits.double()
    if top_k > 0:
        logits = transformers.TopKLogitsWarper(top_k)(NO_IDS, logits)
    if top_p < 1:
        logits = transformers.TopPLogitsWarper(top_p)(NO_IDS, logits)
    return torch.isfinite(logits)


@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0], ids=["flat", "middle", "peaked"])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 1000, 5000])
def test_same_tokens_as_transformers(top_k: int, top_p: float, spread: float) -> None:
    logits = random_logits(4, 1000, seed=top_k, spread=spread)
    assert_same_tokens(logits, kept(logits, [top_k] * 4, [top_p] * 4), warped(logits, top_k, top_p))


def assert_same_tokens(logits: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal, but for one token of a row whose share of the mass is decided by the rounding of float32 probabilities."""
    for row in (ours != theirs).any(dim=-1).nonzero()[:, 0].tolist():
        odd = (ours[row] != theirs[row]).nonzero()[:, 0]
        assert len(odd) == 1
        smaller = (ours & theirs)[row]
        share = logits[row].double().softmax(-1)[smaller].sum().item()
        assert abs(share - round(share, 3)) < 1e-7, "the boundary is not within rounding of a top_p of three digits"


def test_every_row_follows_its_own_parameters() -> None:
    top_k = [0, 3, 0, 40, 1000, 1]
    top_p = [0.9, 1.0, 0.3, 0.8, 0.95, 0.2]
    logits = random_logits(6, 1000)
    expected = torch.cat([warped(logits[i : i + 1], top_k[i], top_p[i]) for i in range(6)])
    assert_same_tokens(logits, kept(logits, top_k, top_p), expected)


def test_rows_of_narrow_and_of_wide_nuclei_in_one_batch() -> None:
    """More than the first few hundred tokens are ranked for some rows only; their result is the same alone."""
    logits = random_logits(6, 20_000) * torch.tensor([4.0, 0.1, 2.0, 0.3, 0.0, 1.0])[:, None]
    top_k, top_p = [0, 5000, 700, 0, 0, 20], [0.9, 0.9, 0.99, 0.5, 0.3, 0.9]
    together = kept(logits, top_k, top_p)
    assert_same_tokens(logits, together[:4], torch.cat([warped(logits[i : i + 1], top_k[i], top_p[i]) for i in range(4)]))
    for i in range(6):
        assert torch.equal(together[i : i + 1], kept(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1]))
    assert 4_000 < together[1].sum() < 5_000
    num_kept = int(together[4].sum())
    assert abs(num_kept - 6_000) <= 1
    assert together[4, :num_kept].all()  # all are equal: the lowest ids


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_with_ties_exactly_the_fewest_tokens_are_kept_and_batch_mates_do_not_matter(data: st.DataObject) -> None:
    """Logits of few distinct values, so that thresholds fall on ties all the time."""
    vocab_size = data.draw(st.integers(1, 40))
    num_rows = data.draw(st.integers(1, 5))
    values = data.draw(st.lists(st.integers(-3, 3), min_size=num_rows * vocab_size, max_size=num_rows * vocab_size))
    top_k = data.draw(st.lists(st.integers(0, vocab_size + 1), min_size=num_rows, max_size=num_rows))
    top_p = data.draw(st.lists(st.sampled_from([0.07, 0.33, 0.51, 0.83, 0.97, 1.0]), min_size=num_rows, max_size=num_rows))
    logits = torch.tensor(values, dtype=torch.float32).view(num_rows, vocab_size)
    result = kept(logits, top_k, top_p)
    for row in range(num_rows):
        assert torch.equal(result[row : row + 1], kept(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1]))
        ranked = sorted(range(vocab_size), key=lambda token: (-logits[row, token].item(), token))
        ranked = ranked[: top_k[row]] if top_k[row] else ranked
        weights = [math.exp(logits[row, token].item()) for token in ranked]
        shares = [sum(weights[: i + 1]) / sum(weights) for i in range(len(weights))]
        count = int(result[row].sum())
        if top_p[row] == 1.0:
            assert count == len(ranked)
        else:  # within rounding of the running sum
            assert shares[count - 1] >= top_p[row] - 1e-5
            assert count == 1 or shares[count - 2] < top_p[row] + 1e-5
        assert result[row].nonzero()[:, 0].tolist() == sorted(ranked[:count])


def test_dropped_logits_stay_dropped() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5, -math.inf, -math.inf]])
    assert kept(logits, [4], [1.0]).tolist() == [[True, False, True, False, False]]


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_keeps_the_same_tokens_as_transformers(min_p: float) -> None:
    logits = random_logits(4, 1000)
    ours = torch.isfinite(apply_min_p(logits.clone(), torch.full((4,), math.log(min_p))))
    theirs = torch.isfinite(transformers.MinPLogitsWarper(min_p)(NO_IDS, logits.float()))
    assert torch.equal(ours, theirs)
    assert ours.any(dim=-1).all()


def test_a_tiny_top_p_keeps_one_token_and_top_k_goes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(5, 1)
    result = kept(logits, [0, 1, 5, 2, 2], [1e-9, 1.0, 1.0, 0.57, 0.58])
    # Of the two that top_k leaves the first has 4/7 of the mass, and of all four 0.4: only in this order 0.57 keeps one.
    assert result.sum(1).tolist() == [1, 1, 4, 1, 2]
    ties = torch.zeros(2, 7)
    assert kept(ties, [1, 0], [1.0, 1e-9]).nonzero().tolist() == [[0, 0], [1, 0]], "of equals the lowest id"


def test_min_p_of_zero_keeps_all_next_to_a_row_that_filters() -> None:
    logits = random_logits(2, 50)
    result = torch.isfinite(apply_min_p(logits.clone(), torch.tensor([-math.inf, 0.0])))
    assert result[0].all()
    assert result[1].sum() == 1


def test_temperature_by_row() -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert apply_temperature(logits, torch.tensor([2.0, 0.5])).tolist() == [[0.5, 1.0], [2.0, 4.0]]
