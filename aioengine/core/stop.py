"""When a request ends because of the token it just got."""

from __future__ import annotations

from aioengine.request import Request, RequestStatus


def check_stop(request: Request, *, max_model_len: int, eos_token_ids: frozenset[int]) -> bool:
    """Whether the newest token of `request` ends it; if so its status and stop_reason are set.

    Stop strings are not looked at here: they need text, and the output processor finds them.
    """
    params = request.sampling_params
    if request.num_output_tokens >= params.min_tokens:
        last_token_id = request.all_token_ids[-1]
        if not params.ignore_eos and last_token_id in eos_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if last_token_id in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = last_token_id
            return True
    if request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
