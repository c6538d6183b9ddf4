"""Draft tokens from n-grams, against a search of the whole history."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from aioengine.core.ngram_proposer import MAX_TOKENS_PER_STEP, NgramIndex, NgramProposer

few_tokens = st.integers(0, 2)  # so that n-grams come back


def draft_by_search(history: list[int], num_tokens: int, *, min_n: int, max_n: int) -> list[int]:
    """The definition: the longest n-gram first, at its latest earlier occurrence, followed by what followed it there."""
    for n in range(min(max_n, len(history)), min_n - 1, -1):
        suffix = history[len(history) - n :]
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == suffix:
                text = list(history)
                for position in range(start + n, start + n + num_tokens):
                    text.append(text[position])  # beyond the end it copies its own draft tokens
                return text[len(history) :]
    return []


@given(
    history=st.lists(few_tokens, min_size=1, max_size=40),
    piece_sizes=st.lists(st.integers(1, 9), max_size=8),
    min_n=st.integers(1, 3),
    extra_n=st.integers(0, 3),
    num_tokens=st.integers(0, 6),
)
@settings(max_examples=400, deadline=None)
def test_an_index_that_grows_finds_what_a_search_finds(
    history: list[int], piece_sizes: list[int], min_n: int, extra_n: int, num_tokens: int
) -> None:
    index = NgramIndex(min_n=min_n, max_n=min_n + extra_n)
    end = 0
    for size in [*piece_sizes, len(history)]:
        end = min(len(history), end + size)
        assert index.extend(history[:end])
        assert index.propose(history[:end], num_tokens) == draft_by_search(history[:end], num_tokens, min_n=min_n, max_n=min_n + extra_n)


@given(history=st.lists(few_tokens, min_size=1, max_size=30), limit=st.integers(1, 5))
def test_an_index_that_takes_in_a_few_tokens_a_call_ends_the_same(history: list[int], limit: int) -> None:
    slow, fast = NgramIndex(min_n=1, max_n=3), NgramIndex(min_n=1, max_n=3)
    num_calls = 1
    while not slow.extend(history, limit=limit):
        num_calls += 1
        assert slow.num_indexed == limit * (num_calls - 1)
    assert num_calls == max(1, -(-(len(history) - 1) // limit))
    fast.extend(history)
    assert slow.propose(history, 4) == fast.propose(history, 4)


def test_large_token_ids_are_told_apart() -> None:
    index = NgramIndex(min_n=2, max_n=2)
    history = [0, 2**31 - 1, 5, 1, 2**31 - 1, 6, 0, 2**31 - 1]
    index.extend(history)
    assert index.propose(history, 1) == [5]


# ------------------------------------------------------------------ how many are drafted
def proposer(num_speculative_tokens: int = 6) -> NgramProposer:
    return NgramProposer(num_speculative_tokens=num_speculative_tokens, min_n=1, max_n=3)


PERIODIC = [1, 2, 3] * 5


def num_proposed(drafter: NgramProposer, *, limit: int = 100, num_running: int = 1, history: list[int] = PERIODIC) -> int:
    return len(drafter.propose("r", history, limit=limit, num_running=num_running))


def test_draft_tokens_follow_the_history_and_keep_to_both_limits() -> None:
    drafter = proposer()
    assert drafter.propose("r", PERIODIC, limit=4, num_running=1) == [1, 2, 3, 1]
    assert drafter.propose("r", PERIODIC, limit=100, num_running=1) == [1, 2, 3, 1, 2, 3]
    assert drafter.propose("r", PERIODIC, limit=0, num_running=1) == []
    assert drafter.propose("other", [7, 8, 9], limit=4, num_running=1) == []


def test_rejected_draft_tokens_make_runs_shorter_and_then_rare() -> None:
    drafter, history, lengths = proposer(), list(PERIODIC), []
    for _ in range(300):
        draft_token_ids = drafter.propose("r", history, limit=100, num_running=1)
        lengths.append(len(draft_token_ids))
        history += [history[-3]]
        if draft_token_ids:
            drafter.record("r", num_draft_tokens=len(draft_token_ids), num_accepted=0, num_tokens=len(history))
    tried = [length for length in lengths if length]
    assert tried == sorted(tried, reverse=True)
    assert tried[0] == 6
    assert sum(lengths[-200:]) <= 200 // 32 + 1  # one row in 32 tokens


def test_accepted_draft_tokens_bring_long_runs_back() -> None:
    drafter = proposer()
    for _ in range(20):
        num_proposed(drafter)
        drafter.record("r", num_draft_tokens=1, num_accepted=0, num_tokens=len(PERIODIC))
    assert num_proposed(drafter) == 0
    lengths = []
    history = PERIODIC * 4
    for _ in range(8):
        lengths.append(num_proposed(drafter, history=history))
        drafter.record("r", num_draft_tokens=lengths[-1], num_accepted=lengths[-1], num_tokens=len(history))
    assert lengths[0] == 1
    assert lengths[-1] == 6
    assert lengths == sorted(lengths)


def test_a_fuller_batch_wants_better_draft_tokens() -> None:
    drafter = proposer()
    num_proposed(drafter)
    lengths = [num_proposed(drafter, num_running=num_running) for num_running in (1, 4, 8, 64)]
    assert lengths[0] == 6
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] <= 1
    for _ in range(20):
        drafter.record("r", num_draft_tokens=6, num_accepted=6, num_tokens=len(PERIODIC))
    assert num_proposed(drafter, num_running=64) >= 3


def test_draft_tokens_after_the_first_wrong_one_are_not_counted() -> None:
    drafter = proposer()
    num_proposed(drafter)
    for _ in range(20):
        drafter.record("r", num_draft_tokens=6, num_accepted=3, num_tokens=len(PERIODIC))
    assert 2 <= num_proposed(drafter) <= 6


# ------------------------------------------------------------------ its cost
def test_a_long_prompt_is_indexed_over_several_steps_and_one_budget_serves_all() -> None:
    drafter = proposer()
    long = list(range(MAX_TOKENS_PER_STEP)) * 2
    drafter.start_step()
    assert not drafter.observe("a", long)
    assert not drafter.observe("b", [1, 2, 3]), "the first one took all of the step's budget"
    assert drafter.propose("b", [1, 2, 1], limit=1, num_running=1) == []
    drafter.start_step()
    assert drafter.observe("b", [1, 2, 1])
    assert drafter.propose("b", [1, 2, 1], limit=1, num_running=1) == [2]
    assert not drafter.observe("a", long)
    drafter.start_step()
    assert drafter.observe("a", long)
    assert drafter.propose("a", long, limit=2, num_running=1) == [0, 1]


@pytest.mark.parametrize("known", [True, False])
def test_what_is_forgotten_is_gone(known: bool) -> None:
    drafter = proposer()
    if known:
        drafter.observe("r", PERIODIC)
        assert drafter.req_ids == {"r"}
    drafter.forget("r")
    assert not drafter.req_ids
