from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.worker.sample.draft_tokens import accept_draft_tokens


@pytest.mark.parametrize(
    ("sampled", "draft_token_ids", "accepted"),
    [
        ([5], [], [5]),
        ([5, 6, 7], [5, 6], [5, 6, 7]),
        ([5, 6, 7], [5, 9], [5, 6]),
        ([5, 6, 7], [4, 6], [5]),
    ],
)
def test_tokens_count_up_to_the_first_that_differs_from_its_draft_token(
    sampled: list[int], draft_token_ids: list[int], accepted: list[int]
) -> None:
    assert accept_draft_tokens(sampled, draft_token_ids) == accepted


@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.lists(st.integers(0, 2), max_size=5))
def test_what_is_accepted_is_what_plain_decoding_gives(table: list[int], draft_token_ids: list[int]) -> None:
    """The next token is a function of the tokens before it; rows behind a rejected draft token saw a history that never was."""

    def next_token(history: list[int]) -> int:
        return table[sum((place + 1) * token for place, token in enumerate(history)) % 6]

    rows = [next_token(draft_token_ids[:j]) for j in range(len(draft_token_ids) + 1)]
    accepted = accept_draft_tokens(rows, draft_token_ids)
    plain: list[int] = []
    for _ in accepted:
        plain.append(next_token(plain))
    assert accepted == plain
    assert (
        len(accepted) == len(draft_token_ids) + 1
        or accepted[:-1] == draft_token_ids[: len(accepted) - 1] != draft_token_ids[: len(accepted)] != accepted
    )


def test_a_row_too_few_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="2 draft tokens need 3 sampled tokens, got 2"):
        accept_draft_tokens([1, 2], [1, 2])
