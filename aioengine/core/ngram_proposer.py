"""Draft tokens for a request, from its own tokens: prompt lookup decoding.

Saxena, "Prompt Lookup Decoding" (2023): the last n tokens of the history are looked up in the history itself, and what
followed them there are the draft tokens. It costs no model, and is right wherever a text repeats itself: edits, extraction, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

_TOKEN_BITS = 32
"""An n-gram is one integer, its tokens side by side: half a tuple's memory, and nothing for the garbage collector to visit."""

MAX_TOKENS_PER_STEP = 2048
"""A long prompt is indexed over several steps: this many tokens take about 2 ms, which everybody's next step waits for."""


class NgramIndex:
    """Where each n-gram of one history last ended, for n in [min_n, max_n]; grows with the history.

    A token costs one entry for each n, under 0.1 KB, and 0.6 us for three of them. The n-grams that end at the last token are left out
    until another follows: a look-up is for an earlier occurrence, and must have a token to continue with.
    """

    __slots__ = ("_ends", "_key", "_masks", "_min_n", "_num_indexed")

    def __init__(self, *, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n, f"n-grams of {min_n} to {max_n} tokens"
        self._min_n = min_n
        self._masks = [(1 << (_TOKEN_BITS * n)) - 1 for n in range(min_n, max_n + 1)]
        self._ends: list[dict[int, int]] = [{} for _ in self._masks]  # for each n: n-gram -> the position after its last occurrence
        self._key = 0  # the last max_n tokens that are indexed
        self._num_indexed = 0

    @property
    def num_indexed(self) -> int:
        """Tokens that were taken in."""
        return self._num_indexed

    def extend(self, token_ids: Sequence[int], *, limit: int = MAX_TOKENS_PER_STEP) -> bool:
        """Take in the tokens of the history that came since the last call, all but its last one and at most `limit`.

        `token_ids` is the whole history, which only ever grows. Returns whether all are in.
        """
        start, last = self._num_indexed, len(token_ids) - 1
        end = min(last, start + limit)
        key, min_n, widest = self._key, self._min_n, self._masks[-1]
        by_n = list(zip(self._masks, self._ends, strict=True))
        widest_n = min_n + len(by_n) - 1
        for position, token_id in enumerate(islice(token_ids, start, end), start + 1):
            key = (key << _TOKEN_BITS | token_id) & widest
            for mask, ends in by_n if position >= widest_n else by_n[: max(0, position - min_n + 1)]:
                ends[key & mask] = position
        self._key = key
        self._num_indexed = max(start, end)
        return self._num_indexed >= last

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """`num_tokens` draft tokens for what follows `token_ids`, or none. Only right after an `extend` that took in everything.

        The longest n-gram that occurred before decides, at its latest occurrence. Where that is so late that the history
        ends before the draft tokens do, they go on with themselves, as a copy in LZ77 does: the text is taken to be periodic.
        """
        length = len(token_ids)
        assert self._num_indexed == length - 1, f"{self._num_indexed} of {length} tokens are indexed"
        start = self._find(self._key << _TOKEN_BITS | token_ids[-1], length)
        if start is None or num_tokens < 1:
            return []
        draft_token_ids = list(token_ids[start : start + num_tokens])
        period = length - start
        while len(draft_token_ids) < num_tokens:
            draft_token_ids.append(draft_token_ids[-period])
        return draft_token_ids

    def _find(self, key: int, length: int) -> int | None:
        """The position after the latest earlier occurrence of the longest n-gram in `key` that has one."""
        for n in range(min(length, self._min_n + len(self._masks) - 1), self._min_n - 1, -1):
            end = self._ends[n - self._min_n].get(key & self._masks[n - self._min_n])
            if end is not None:
                return end
        return None


class NgramProposer:
    """The index, and the recent luck, of every request that may have draft tokens.

    A draft token costs the model a row, and saves one if it is accepted. A step on the CPU costs as much as its rows and
    `_STEP_COST_IN_ROWS` more, so of `num_running` requests each pays 1 + _STEP_COST_IN_ROWS / num_running rows for a token,
    and a draft token is worth its row if it is accepted with a probability of at least the inverse. The probability of the j-th draft token
    of a run is taken to be the j-th power of the share of recent draft tokens that were accepted (a moving average over some four).

    Where not even one draft token is worth it, one is made now and then to see: after pauses that double up to `_MAX_PAUSE` tokens.
    So text that never repeats pays one row in so many, and a full batch is not slowed down by draft tokens of which half are accepted.
    """

    def __init__(self, *, num_speculative_tokens: int, min_n: int, max_n: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._min_n, self._max_n = min_n, max_n
        self._states: dict[str, _RequestState] = {}
        self._num_left_to_index = MAX_TOKENS_PER_STEP

    @property
    def req_ids(self) -> frozenset[str]:
        """The requests that something is kept of."""
        return frozenset(self._states)

    def start_step(self) -> None:
        """A new step is being planned: it may index `MAX_TOKENS_PER_STEP` more tokens."""
        self._num_left_to_index = MAX_TOKENS_PER_STEP

    def observe(self, req_id: str, token_ids: Sequence[int]) -> bool:
        """Take in a request's known tokens, as many as the step allows; returns whether all are in.

        Called for every step of the request, so that a long prompt is in when its output begins.
        """
        index = self._state(req_id).index
        num_before = index.num_indexed
        is_complete = index.extend(token_ids, limit=self._num_left_to_index)
        self._num_left_to_index -= index.num_indexed - num_before
        return is_complete

    def propose(self, req_id: str, token_ids: Sequence[int], *, limit: int, num_running: int) -> list[int]:
        """At most `limit` draft tokens for what follows `token_ids`, the whole history of one of `num_running` requests."""
        if not self.observe(req_id, token_ids):
            return []
        state = self._states[req_id]
        num_draft_tokens = self._num_worthwhile(state, limit, num_running)
        if not num_draft_tokens and limit > 0 and len(token_ids) >= state.resume_at:
            num_draft_tokens = 1
        return state.index.propose(token_ids, num_draft_tokens)

    def _num_worthwhile(self, state: _RequestState, limit: int, num_running: int) -> int:
        needed = num_running / (num_running + _STEP_COST_IN_ROWS)
        num_draft_tokens, probability = 0, state.acceptance
        while num_draft_tokens < min(limit, self._num_speculative_tokens) and probability >= needed:
            num_draft_tokens += 1
            probability *= state.acceptance
        return num_draft_tokens

    def record(self, req_id: str, *, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        """What became of a run of draft tokens, at least one, after which the request has `num_tokens` tokens.

        Those after the first wrong one say nothing: they continue what is not there.
        """
        state = self._states[req_id]
        for is_right in (True,) * num_accepted + (False,) * (num_accepted < num_draft_tokens):
            state.acceptance += (is_right - state.acceptance) / _AVERAGED_DRAFT_TOKENS
        state.pause = 0 if num_accepted else min(max(1, 2 * state.pause), _MAX_PAUSE)
        state.resume_at = num_tokens + state.pause

    def forget(self, req_id: str) -> None:
        """Free what is kept of a request. Unknown ids are ignored."""
        self._states.pop(req_id, None)

    def _state(self, req_id: str) -> _RequestState:
        state = self._states.get(req_id)
        if state is None:
            state = self._states[req_id] = _RequestState(NgramIndex(min_n=self._min_n, max_n=self._max_n))
        return state


_STEP_COST_IN_ROWS = 4.0
"""Measured with the built-in model on two cores: 6 ms a step and 1.8 ms a row (1 to 16 requests, 1 to 9 rows each)."""

_AVERAGED_DRAFT_TOKENS = 4
_MAX_PAUSE = 32


class _RequestState:
    __slots__ = ("acceptance", "index", "pause", "resume_at")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.acceptance = 0.8  # of recent draft tokens; to begin with, a run is tried if few requests run
        self.pause = 0  # tokens between the last run and the next, if the last was wrong from the start
        self.resume_at = 0  # the history's length from which on a single draft token is tried where none is worth it
