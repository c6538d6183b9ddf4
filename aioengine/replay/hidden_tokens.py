"""Tokens whose ids were not recorded: what the scheduler must see in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aioengine.core.ngram_proposer import NgramProposer
from aioengine.events.step_event import FinishedInfo
from aioengine.events.wire import HIDDEN_TOKEN_ID
from aioengine.outputs import FinishReason
from aioengine.request import Request
from aioengine.resolved_config import SchedulerConfig

_REPEATS_TOKEN_ID = -2
"""Stands for the token that completed a repetition."""


class RecordedProposer(NgramProposer):
    """Proposes what was recorded: without token ids there are no n-grams to look up."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(
            num_speculative_tokens=config.num_speculative_tokens, min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max
        )
        self.recorded: Mapping[str, list[int]] = {}  # of the step that is being planned

    def observe(self, req_id: str, token_ids: Sequence[int]) -> bool:
        return True

    def propose(self, req_id: str, token_ids: Sequence[int], *, limit: int, num_running: int) -> list[int]:
        """Never more than `limit`: if it was, the frames differ."""
        return list(self.recorded.get(req_id, ()))[: max(limit, 0)]

    def record(self, req_id: str, *, num_draft_tokens: int, num_accepted: int, num_tokens: int) -> None:
        """Nothing is learned."""


def expect_hidden_repetition(request: Request) -> None:
    """Let a request that repetition can end do so by the token that stands for it, and by no row of hidden ones."""
    if request.tail_repeats is not None:
        request.tail_repeats = _is_repetition


def _is_repetition(token_id: int) -> bool:
    return token_id == _REPEATS_TOKEN_ID


def end_token_id(request: Request, end: FinishedInfo, num_accepted: int, *, eos_token_ids: frozenset[int]) -> int:
    """The last of `num_accepted` tokens, with which the scheduler itself ended a request.

    A stop string that came with it may have taken its place in `end`: then any token will do that ends the request.
    """
    if request.num_tokens + num_accepted >= request.max_num_tokens:
        return HIDDEN_TOKEN_ID  # its length ends it
    reason: FinishReason = end.finish_reason
    if reason == "repetition":
        return _REPEATS_TOKEN_ID
    if isinstance(end.stop_reason, int):
        return end.stop_reason
    candidates = (request.end_token_ids & eos_token_ids) or request.end_token_ids
    return min(candidates) if candidates else _REPEATS_TOKEN_ID
