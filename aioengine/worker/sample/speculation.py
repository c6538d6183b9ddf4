"""Which of the guessed tokens are kept, once every position has been sampled from its own distribution."""

from __future__ import annotations

from collections.abc import Sequence


def accept_guesses(sampled: Sequence[int], guesses: Sequence[int]) -> list[int]:
    """The tokens that plain decoding would have given: 1 to k + 1 of them.

    sampled: k + 1 tokens; the j-th was sampled after the known tokens and guesses[:j]. guesses: k tokens.

    A sampled token counts if all guesses before it were what was sampled; the first one that differs from its guess is the
    last that counts. Every token is drawn from the model's own distribution with the random number of its own position, so
    the output is the one without guesses, token for token. A guess g is accepted with probability p(g): what rejection
    sampling (Leviathan et al., arXiv:2211.17192) gives for a proposal that is certain of g.

    Raises ValueError if there is not exactly one sampled token more than guesses.
    """
    if len(sampled) != len(guesses) + 1:
        raise ValueError(f"{len(guesses)} guesses need {len(guesses) + 1} sampled tokens, got {len(sampled)}")
    accepted = []
    for token_id, guess in zip(sampled, guesses, strict=False):
        accepted.append(token_id)
        if token_id != guess:
            return accepted
    return [*accepted, sampled[-1]]
