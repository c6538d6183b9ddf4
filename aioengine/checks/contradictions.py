"""Parameters that together forbid every token: known before a request runs, so it need not run to find out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aioengine.checks.values import shorten

_MAX_FOLLOWED_TOKENS = 16
_MAX_FOLLOWED_STEPS = 4096
_MAX_STATES = 512


def free_token_ids(allowed: Sequence[int] | None, bad_words: Sequence[Sequence[int]], *, vocab_size: int | None) -> set[int] | None:
    """The allowed tokens that are no bad words by themselves. None: any token of the vocabulary but a few.

    allowed: None: all of them. vocab_size: None: not known here.
    """
    gone = {word[0] for word in bad_words if len(word) == 1}
    if allowed is not None:
        return set(allowed) - gone
    if vocab_size is None or len(gone) < vocab_size:
        return None
    return set(range(vocab_size)) - gone


def why_nothing_is_left(
    allowed: Sequence[int] | None,
    bad_words: Sequence[Sequence[int]],
    *,
    min_tokens: int,
    max_tokens: int | None,
    ending: Collection[int],  # end-of-sequence tokens that count, and stop ids: those that are known
    vocab_size: int | None = None,
) -> str | None:
    """Which parameters leave no token to sample, at the first token or at one that every output comes to; None: none do."""
    if not bad_words and (allowed is None or not min_tokens):
        return None
    free = free_token_ids(allowed, bad_words, vocab_size=vocab_size)
    if free is None:
        if vocab_size is not None and min_tokens and not _any_left(vocab_size, bad_words, ending):
            return f"bad_words and min_tokens ({min_tokens}) forbid every token of the vocabulary"
        return None
    if not free:
        return f"bad_words_token_ids {shorten(bad_words)} forbid every token of {_name(allowed)}"
    ends = free.intersection(ending)
    if min_tokens and ends == free:
        return f"every token of {_name(allowed)} ends the output or is a bad word, and min_tokens is {min_tokens}"
    dead_end = _dead_end(free, bad_words, ends=ends, min_tokens=min_tokens, max_tokens=max_tokens)
    if dead_end is not None:
        return f"after {dead_end} of {_name(allowed)} the bad words {shorten(bad_words)} leave none to follow"
    return None


def _name(allowed: Sequence[int] | None) -> str:
    return "the vocabulary" if allowed is None else f"allowed_token_ids {shorten(allowed)}"


def _any_left(vocab_size: int, bad_words: Sequence[Sequence[int]], ending: Collection[int]) -> bool:
    return len({word[0] for word in bad_words if len(word) == 1}.union(ending)) < vocab_size


def _dead_end(free: set[int], bad_words: Sequence[Sequence[int]], *, ends: set[int], min_tokens: int, max_tokens: int | None) -> int | None:
    """After how many tokens bad words of several tokens leave no way on, on whatever way; None: there is one, or too many to follow.

    A state is the longest end of the output that a bad word begins with.
    """
    words = {tuple(word) for word in bad_words if len(word) > 1}
    if not words or len(free) > _MAX_FOLLOWED_TOKENS:
        return None
    beginnings = {word[:length] for word in words for length in range(len(word))}
    ordered = sorted(free)
    states: set[tuple[int, ...]] = {()}
    seen: set[frozenset[tuple[int, ...]]] = set()
    for num_tokens in range(min(max_tokens or _MAX_FOLLOWED_STEPS, _MAX_FOLLOWED_STEPS)):
        following: set[tuple[int, ...]] = set()
        for state in sorted(states):
            for token_id in ordered:
                if token_id in ends and num_tokens < min_tokens:
                    continue
                output = (*state, token_id)
                if any(output[start:] in words for start in range(len(output))):
                    continue
                if token_id in ends:
                    return None  # the output may end here
                following.add(next(output[start:] for start in range(len(output) + 1) if output[start:] in beginnings))
        if not following:
            return num_tokens
        if len(following) > _MAX_STATES or frozenset(following) in seen:
            return None
        seen.add(frozenset(following))
        states = following
    return None
