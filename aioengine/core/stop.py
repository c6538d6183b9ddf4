"""When a request ends because of the token it just got."""

from __future__ import annotations

from aioengine.request import Request, RequestStatus
from aioengine.sampling_params import RepetitionDetectionParams

REPETITION_STOP_REASON = "repetition_detected"


def set_end_conditions(request: Request, *, max_model_len: int, eos_token_ids: frozenset[int]) -> None:
    """Work out once what can end a request, so that a token that ends nothing costs three comparisons."""
    params = request.sampling_params
    request.max_num_tokens = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
    request.end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    repetition = params.repetition_detection
    request.tail_repeats = RepetitionDetector(repetition).push if repetition is not None and repetition.max_pattern_size else None


def check_stop(request: Request, *, eos_token_ids: frozenset[int]) -> bool:
    """Whether the newest token of `request` ends it; if so its status and stop_reason are set.

    To be called once for each token that can end it: the last of its length, an end token, any token where repetition can. As in
    vLLM an end token goes before the length, and that before repetition. Stop strings are not looked at here: they need text, and
    the output processor finds them.
    """
    params = request.sampling_params
    last_token_id = request.all_token_ids[-1]
    repeats = request.tail_repeats is not None and request.tail_repeats(last_token_id)
    is_long_enough = request.num_output_tokens >= params.min_tokens
    # An end token can come early only where the grammar allowed nothing else, and then nothing can follow.
    is_forced = params.structured_outputs is not None and last_token_id in eos_token_ids
    if last_token_id in request.end_token_ids and (is_long_enough or is_forced):
        request.status = RequestStatus.FINISHED_STOPPED
        if params.ignore_eos or last_token_id not in eos_token_ids:
            request.stop_reason = last_token_id
        return True
    if request.num_tokens >= request.max_num_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    if repeats and is_long_enough:
        request.status = RequestStatus.FINISHED_REPETITION
        request.stop_reason = REPETITION_STOP_REASON
        return True
    return False


class RepetitionDetector:
    """Whether an output ends in a pattern that came `min_count` times in a row.

    A tail repeats with period p that often if each of its last p * (min_count - 1) tokens equals the one p before it. So for
    each p that the newest token fits, the length of that run is kept. A token costs as much as it occurs among the last
    `max_pattern_size`: mostly a few entries of a dict, at worst that many.
    """

    __slots__ = ("_max_period", "_min_count", "_min_period", "_num_tokens", "_positions", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._min_period = max(params.min_pattern_size, 1)
        self._max_period = params.max_pattern_size
        self._min_count = params.min_count
        self._num_tokens = 0
        self._positions: dict[int, list[int]] = {}  # token id -> where it came, ascending; those too far back are dropped in time
        self._runs: dict[int, int] = {}  # period -> how many tokens to the end equal the one that far before them

    def push(self, token_id: int) -> bool:
        """Take in the next token of the output; returns whether its tail repeats now."""
        position = self._num_tokens
        self._num_tokens = position + 1
        positions = self._positions.setdefault(token_id, [])
        runs: dict[int, int] = {}
        repeats = False
        for before in reversed(positions):
            period = position - before
            if period > self._max_period:
                break
            if period >= self._min_period:
                runs[period] = run = self._runs.get(period, 0) + 1
                repeats = repeats or run >= period * (self._min_count - 1)
        self._runs = runs
        positions.append(position)
        if len(positions) > 2 * self._max_period:
            del positions[: -self._max_period]
        return repeats
