"""Which of the draft tokens are kept, once every position has been sampled from its own distribution."""

from __future__ import annotations

from collections.abc import Sequence


def accept_draft_tokens(sampled: Sequence[int], draft_token_ids: Sequence[int]) -> list[int]:
    """The tokens that plain decoding would have given: 1 to k + 1 of them.

    sampled: k + 1 tokens; the j-th was sampled after the known tokens and draft_token_ids[:j]. draft_token_ids: k tokens.

    A sampled token counts if all draft tokens before it were what was sampled; the first one that differs from its draft token is the
    last that counts. Every token is drawn from the model's own distribution with the random number of its own position, so
    the output is the one without draft tokens, token for token. A draft token g is accepted with probability p(g): what rejection
    sampling (Leviathan et al., arXiv:2211.17192) gives for a proposal that is certain of g.

    Raises ValueError if there is not exactly one sampled token more than draft tokens.
    """
    if len(sampled) != len(draft_token_ids) + 1:
        raise ValueError(f"{len(draft_token_ids)} draft tokens need {len(draft_token_ids) + 1} sampled tokens, got {len(sampled)}")
    accepted = []
    for token_id, draft_token_id in zip(sampled, draft_token_ids, strict=False):
        accepted.append(token_id)
        if token_id != draft_token_id:
            return accepted
    return [*accepted, sampled[-1]]
