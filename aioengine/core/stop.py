"""When a request ends because of the token it just got."""

from __future__ import annotations

from aioengine.request import Request, RequestStatus


def set_end_conditions(request: Request, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
    """Work out once what can end a request, so that a token that ends nothing costs two comparisons."""
    params = request.sampling_params
    request.max_num_tokens = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    request.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


def may_stop(request: Request, token_id: int) -> bool:
    """False: `token_id`, the newest token of `request`, does not end it. True: ask `check_stop`."""
    return request.num_tokens >= request.max_num_tokens or token_id in request.end_token_ids


def check_stop(request: Request, *, eos_token_ids: frozenset[int]) -> bool:
    """Whether the newest token of `request` ends it; if so its status and stop_reason are set.

    Stop strings are not looked at here: they need text, and the output processor finds them.
    """
    params = request.sampling_params
    last_token_id = request.all_token_ids[-1]
    is_long_enough = request.num_output_tokens >= params.min_tokens
    if params.structured_outputs is not None and last_token_id in eos_token_ids:
        is_long_enough = True  # it can come early only where the grammar allowed nothing else, and then nothing can follow
    if last_token_id in request.end_token_ids and is_long_enough:
        request.status = RequestStatus.FINISHED_STOPPED
        if params.ignore_eos or last_token_id not in eos_token_ids:
            request.stop_reason = last_token_id
        return True
    if request.num_tokens >= request.max_num_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
