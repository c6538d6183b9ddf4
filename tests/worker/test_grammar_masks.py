"""A bitmask on a row of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioengine.worker.sample.grammar import apply_bitmask, let_grammars_end


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 261, 4099])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_forbidden_tokens_become_minus_infinity_and_others_keep_their_bits(vocab_size: int, share: float) -> None:
    rng = np.random.default_rng(vocab_size)
    is_allowed = rng.random(vocab_size) < share
    bitmask = np.packbits(is_allowed, bitorder="little").tobytes()
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
    logits[1, 0] = torch.inf
    before = logits.clone()
    apply_bitmask(logits[1], bitmask + b"\xff")  # what follows the vocabulary does not matter
    expected = torch.where(torch.from_numpy(is_allowed), before[1], -torch.inf)
    assert torch.equal(logits[1], expected)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


def test_nan_is_not_hidden() -> None:
    """A request with NaN logits fails; a mask must not make it look fine."""
    logits = torch.tensor([torch.nan, 1.0, torch.nan])
    apply_bitmask(logits, bytes([0b011]))
    assert logits.isnan().tolist() == [True, False, True]


def test_a_bitmask_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bytes does not cover 17 tokens"):
        apply_bitmask(torch.zeros(17), b"\xff\xff")


def test_an_output_ends_where_the_other_masks_have_left_nothing_but_its_end() -> None:
    """Only there: not where something is left, where the grammar does not allow the end, or where logits are not numbers."""
    eos_token_ids = np.array([2, 9])
    may_end, may_not = bytes([0b0000_0111, 0b10]), bytes([0b0000_0011, 0b0])
    logits = torch.full((5, 10), -torch.inf)
    logits[1, 0] = 1.0
    logits[3, 4] = torch.nan
    before = logits.clone()
    let_grammars_end(logits, {0: may_end, 1: may_end, 2: may_not, 3: may_end}, eos_token_ids)
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == [2, 9]
    assert torch.equal(logits[1:].nan_to_num(7.0), before[1:].nan_to_num(7.0))
