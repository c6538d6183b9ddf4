from __future__ import annotations

import pytest
import torch

from aioengine_kernels.draw_tokens import draw_tokens, draw_tokens_ref
from aioengine_kernels.logprobs import token_logprobs, token_logprobs_ref
from aioengine_kernels.penalties import apply_penalties, apply_penalties_ref
from aioengine_kernels.top_k_top_p import top_k_top_p, top_k_top_p_ref

VOCAB = 8192 + 37
NEG_INF = float("-inf")


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_logits(rows: int, vocab: int = VOCAB, *, seed: int = 0) -> torch.Tensor:
    """[rows, vocab] float32 with a padded row stride."""
    generator = torch.Generator().manual_seed(seed)
    padded = torch.full((rows, vocab + 11), float("nan"))
    padded[:, :vocab] = torch.randn(rows, vocab, generator=generator) * 3
    return padded[:, :vocab]


def test_penalties_match_float64() -> None:
    torch.manual_seed(0)
    logits = make_logits(3)
    state = {
        "prompt_mask": (torch.rand(5, VOCAB) < 0.1).to(torch.int8),
        "output_counts": torch.randint(0, 3, (5, VOCAB), dtype=torch.int32),
        "idx_mapping": int32(4, 0, 2),
        "repetition": torch.tensor([1.0, 1.3, 0.8]),
        "frequency": torch.tensor([0.0, 0.2, -0.1]),
        "presence": torch.tensor([0.0, 0.5, 0.1]),
    }
    expected = apply_penalties_ref(logits.double(), **state)
    untouched = logits[0].clone()
    apply_penalties(logits, **state)
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits[0], untouched)


def filters(*rows: tuple[float, int, float, float]) -> dict[str, torch.Tensor]:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return {
        "temperature": torch.tensor(temperature),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p),
        "min_p": torch.tensor(min_p),
    }


def test_filters_keep_what_sorting_keeps() -> None:
    parameters = filters(
        (1.0, 50, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (2.0, 0, 0.3, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.7, 40, 0.8, 0.02),
        (1.0, VOCAB - 1, 1.0, 0.0),
        (0.5, 0, 1e-4, 0.0),
        (0.3, 0, 1.0, 1.0),
    )
    logits = make_logits(9)
    expected = top_k_top_p_ref(logits.clone(), **parameters)
    top_k_top_p(logits, **parameters)
    kept = logits.isfinite()
    assert kept[0].sum() == 50
    assert kept[1].sum() == kept[7].sum() == kept[8].sum() == 1
    assert kept[6].sum() == VOCAB - 1
    # Float32 sums may disagree with float64 ones about the token on which the top-p mass is reached.
    assert ((kept != expected.isfinite()).sum(1) <= 1).all()
    assert kept.gather(1, logits.argmax(1, keepdim=True)).all()


def test_filters_leave_greedy_and_neutral_rows_alone() -> None:
    logits = make_logits(3, 100)
    before = logits.clone()
    top_k_top_p(logits, **filters((0.0, 5, 0.5, 0.5), (1.0, 0, 1.0, 0.0), (1.0, 100, 1.0, 0.0)))
    assert torch.equal(logits, before)


def test_filters_with_ties_and_masked_tokens() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -1.0, NEG_INF, NEG_INF, -3.0]]).repeat(3, 1)
    top_k_top_p(logits, **filters((1.0, 2, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (1.0, 6, 0.999, 0.0)))
    assert logits.isfinite().tolist()[0] == [True] * 2 + [False] * 6  # of those that tie with the second the first
    assert logits.isfinite().tolist()[1] == [True] * 5 + [False, False, True]  # fewer than k are left: all of them
    assert logits.isfinite().tolist()[2] == [True] * 5 + [False, False, True]


def test_tokens_are_those_of_the_reference() -> None:
    logits = make_logits(6)
    arguments = {
        "temperature": torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 1.0]),
        "seeds": torch.tensor([1, -5, 2**40 + 3, 7, 7, -(2**63)]),
        "indices": torch.tensor([0, 1, 5, 9, 10, 2**31 - 1]),
    }
    tokens = draw_tokens(logits, **arguments)
    assert torch.equal(tokens, draw_tokens_ref(logits, **arguments))
    assert tokens[0] == logits[0].argmax()


def test_a_draw_depends_on_nothing_but_its_request() -> None:
    logits = make_logits(4)
    seeds, indices = torch.tensor([11, 22, 33, 44]), torch.tensor([0, 3, 1, 2])
    temperature = torch.full((4,), 1.5)
    together = draw_tokens(logits, temperature=temperature, seeds=seeds, indices=indices)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = draw_tokens(logits[order], temperature=temperature, seeds=seeds[order], indices=indices[order])
    assert torch.equal(shuffled, together[order])
    alone = draw_tokens(logits[1:2], temperature=temperature[:1], seeds=seeds[1:2], indices=indices[1:2])
    assert torch.equal(alone, together[1:2])


def test_sampled_tokens_are_left_for_the_next_step() -> None:
    logits = make_logits(3, 50)
    last = torch.full((5,), -1, dtype=torch.int32)
    tokens = draw_tokens(
        logits,
        temperature=torch.zeros(3),
        seeds=torch.zeros(3, dtype=torch.int64),
        indices=torch.zeros(3, dtype=torch.int64),
        idx_mapping=int32(3, -1, 0),
        last_sampled_tokens=last,
    )
    assert last.tolist() == [tokens[2], -1, -1, tokens[0], -1]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 4000, 8200]] = 1.0
    zero = torch.zeros(1, dtype=torch.int64)
    assert draw_tokens(logits, temperature=torch.zeros(1), seeds=zero, indices=zero).tolist() == [5]


@pytest.mark.parametrize("count", [1, 6])
def test_logprobs_and_ranks_match_float64(count: int) -> None:
    logits = make_logits(3)
    logits[1, 100:2000] = NEG_INF
    token_ids = torch.cat((torch.tensor([[7], [8], [8200]]), logits.topk(5).indices), dim=1)[:, :count]
    logprobs, ranks = token_logprobs(logits, token_ids)
    expected, expected_ranks = token_logprobs_ref(logits.double(), token_ids)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(ranks, expected_ranks)


def test_a_token_out_of_the_vocabulary_is_caught() -> None:
    with pytest.raises(Exception, match="out of bounds"):
        token_logprobs(torch.zeros(1, 16), torch.tensor([[10_000_000]]))


def test_nan_is_never_drawn_and_a_row_of_nan_gives_a_token_of_the_vocabulary() -> None:
    logits = make_logits(4, 2500)
    logits[0] = float("nan")
    logits[1, ::2] = float("nan")
    logits[2] = NEG_INF
    draw = {"temperature": torch.tensor([0.0, 0.0, 1.0, 1.0]), "seeds": torch.arange(4), "indices": int32(0, 0, 0, 0)}
    tokens = draw_tokens(logits, **draw)
    assert torch.equal(tokens, draw_tokens_ref(logits, **draw))
    assert tokens[0] == 0
    assert tokens[1] % 2 == 1
    assert ((tokens >= 0) & (tokens < 2500)).all()


NAN, INF = float("nan"), float("inf")
POISON = {
    "one NaN": lambda row: row.index_fill_(0, torch.tensor([17]), NAN),
    "one inf": lambda row: row.index_fill_(0, torch.tensor([17]), INF),
    "one -inf": lambda row: row.index_fill_(0, torch.tensor([17]), NEG_INF),
    "NaN, inf and -inf": lambda row: row.index_copy_(0, torch.tensor([0, 17, 99]), torch.tensor([NAN, INF, NEG_INF])),
    "all but one NaN": lambda row: row.index_fill_(0, torch.arange(1, 200), NAN),
    "all NaN": lambda row: row.fill_(NAN),
    "all inf": lambda row: row.fill_(INF),
    "all -inf": lambda row: row.fill_(NEG_INF),
    "the largest finite and the least": lambda row: row.index_copy_(0, torch.tensor([3, 4]), torch.tensor([3.4e38, -3.4e38])),
}


def _filter_all(logits: torch.Tensor) -> list[torch.Tensor]:
    """Rows of every filter; the first and the last row of `make_poisoned` are healthy in all of them."""
    rows = [(0.8, 20, 0.9, 0.01), (1.0, 0, 0.5, 0.0), (1e-38, 0, 0.9, 0.0), (3e38, 5, 0.9, 0.5), (0.7, 0, 1.0, 0.3)]
    results = []
    for row in rows:
        copy = logits.clone()
        results.append(top_k_top_p(copy, **filters(*[row] * len(logits))))
    return results


def _draw(logits: torch.Tensor) -> list[torch.Tensor]:
    count = len(logits)
    seeds, indices = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    return [
        draw_tokens(logits.clone(), temperature=torch.full((count,), temperature), seeds=seeds, indices=indices)
        for temperature in (0.0, 0.7, 3e38)
    ]


def _penalize(logits: torch.Tensor) -> list[torch.Tensor]:
    count, vocab = logits.shape
    torch.manual_seed(3)
    state = {
        "prompt_mask": (torch.rand(count, vocab) < 0.1).to(torch.int8),
        "output_counts": torch.randint(0, 3, (count, vocab), dtype=torch.int32),
        "idx_mapping": torch.arange(count, dtype=torch.int32),
        "repetition": torch.full((count,), 1.3),
        "frequency": torch.full((count,), 0.2),
        "presence": torch.full((count,), 0.5),
    }
    return [apply_penalties(logits.clone(), **state)]


def _logprobs(logits: torch.Tensor) -> list[torch.Tensor]:
    ids = torch.tensor([[17, 3, 99, 0]]).repeat(len(logits), 1)
    logprobs, ranks = token_logprobs(logits.clone(), ids)
    expected, expected_ranks = token_logprobs_ref(logits.double(), ids)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(ranks, expected_ranks)
    return [logprobs, ranks]


SAMPLING_KERNELS = {"top_k_top_p": _filter_all, "draw_tokens": _draw, "apply_penalties": _penalize, "token_logprobs": _logprobs}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("kernel", SAMPLING_KERNELS)
def test_what_is_no_logit_ends_and_leaves_healthy_rows_as_they_are(kernel: str, poison: str) -> None:
    run = SAMPLING_KERNELS[kernel]
    healthy = make_logits(3, 200)
    poisoned = healthy.clone()
    POISON[poison](poisoned[1])
    for with_poison, without in zip(run(poisoned), run(healthy), strict=True):
        assert torch.equal(with_poison[0], without[0])
        assert torch.equal(with_poison[2], without[2])
        if with_poison.dim() == 1:  # tokens, ranks
            assert 0 <= int(with_poison[1]) <= 200


@pytest.mark.parametrize("poison", ["one NaN", "one inf", "NaN, inf and -inf"])
def test_filters_and_draws_see_minus_infinity_where_there_is_no_logit(poison: str) -> None:
    logits = make_logits(2, 200)
    clean = logits.clone()
    POISON[poison](logits[1])
    clean[1][~(logits[1] < INF)] = NEG_INF
    clean[1][logits[1] == NEG_INF] = NEG_INF
    parameters = filters((1.0, 0, 1.0, 0.0), (0.9, 30, 0.8, 0.001))
    kept, expected = top_k_top_p(logits, **parameters), top_k_top_p_ref(clean, **parameters)
    assert torch.equal(kept[1].isfinite(), expected[1].isfinite())
    draw = {"temperature": torch.tensor([0.0, 1.0]), "seeds": torch.arange(2), "indices": int32(0, 0)}
    assert torch.equal(draw_tokens(kept, **draw), draw_tokens_ref(expected, **draw))


def test_the_search_for_a_threshold_needs_no_more_passes_than_it_has() -> None:
    """The widest interval of float32's ordered bits, always left in its largest part."""
    width, passes = 2 * 0x7F800001, 0
    while width > 1:
        step = max(width // 4, 1)
        width = max(step, width - 3 * step)
        passes += 1
    assert passes <= 18
