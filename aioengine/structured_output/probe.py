"""A first look at how a grammar goes on, so that what is bound to fail is refused when it is submitted."""

from __future__ import annotations

from aioengine.sampling_params import SamplingParams
from aioengine.structured_output.matcher import NO_NEXT_TOKEN, CompiledGrammar, GrammarError, GrammarMatcher

_NUM_BRANCHES = 4
_DEPTH = 3
_MAX_FORCED = 64


def is_hopeless(grammar: CompiledGrammar) -> str | None:
    """Why each beginning that was tried fails; None if one of them can go on.

    A few tokens are tried after each other, `_NUM_BRANCHES` of them where the grammar leaves a choice, so that "hopeless"
    means: whatever came first, the parser's limits were reached. What fails later does so while it is generated.
    """
    return _try(grammar, [], depth=_DEPTH)


def _try(grammar: CompiledGrammar, token_ids: list[int], *, depth: int) -> str | None:
    matcher = grammar.start(SamplingParams())
    matcher.accept(token_ids)
    try:
        token_ids, choice = _follow_forced(matcher, token_ids, grammar)
    except GrammarError as exc:
        # A vocabulary that lacks a character may still have others, and its requests fail with that cause.
        return None if str(exc) == NO_NEXT_TOKEN else str(exc)
    if depth == 0:
        return None
    cause = None
    for token_id in choice:
        cause = _try(grammar, [*token_ids, token_id], depth=depth - 1)
        if cause is None:
            return None
    return cause


def _follow_forced(matcher: GrammarMatcher, token_ids: list[int], grammar: CompiledGrammar) -> tuple[list[int], list[int]]:
    """The tokens up to the first choice, and what is tried there: nothing, if the output may end or goes on for long."""
    token_ids = list(token_ids)
    for _ in range(_MAX_FORCED):
        mask = matcher.bitmask()
        if int.from_bytes(mask, "little") & grammar.eos_bits:
            break
        choice = _spread(mask)
        if len(choice) > 1:
            return token_ids, choice
        token_ids += choice
        matcher.accept(choice)
    return token_ids, []


def _spread(mask: bytes) -> list[int]:
    """Some of the tokens in a mask, from its beginning, middle and end; one, if it is the only one."""
    places = [place for place, byte in enumerate(mask) if byte]
    chosen = {places[(len(places) - 1) * part // (_NUM_BRANCHES - 1)] for part in range(_NUM_BRANCHES)}
    return [8 * place + bit for place in sorted(chosen) for bit in _ends_of(mask[place])]


def _ends_of(byte: int) -> list[int]:
    """The lowest and the highest bit."""
    return sorted({(byte & -byte).bit_length() - 1, byte.bit_length() - 1})
