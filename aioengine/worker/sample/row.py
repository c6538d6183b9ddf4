"""One request's parameters as they fit into tables of a fixed width, or an error about this request alone.

Nothing but the standard library: `FakeExecutor` fills the same row, so that tests without a model notice what does not fit.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ParamsRow:
    """What `SamplingStates` keeps of a request in its columns."""

    temperature: float  # float32; 0 is greedy
    top_k: int  # int64; 0 keeps all
    top_p: float  # float64
    log_min_p: float  # float32; -inf keeps all
    seed: int  # uint64
    min_tokens: int  # int64
    num_logprobs: int  # int64; -1: none wanted


_WIDTHS = {"temperature": "f", "top_k": "q", "top_p": "d", "log_min_p": "f", "seed": "Q", "min_tokens": "q", "num_logprobs": "q"}


def params_row(params: SamplingParams) -> ParamsRow:
    """Raises ValueError naming the parameter that does not fit, whatever the door let through. `params.seed` is a number here."""
    if params.seed is None:
        raise ValueError("a request without a seed: the input processor draws one")
    row = ParamsRow(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        seed=params.seed,
        min_tokens=params.min_tokens,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
    )
    for name, width in _WIDTHS.items():
        _check_width(name, width, [getattr(row, name)])
    return row


def check_edit_widths(params: SamplingParams) -> None:
    """The same for what a request does to its logits: token ids are int64 and not negative, numbers float32."""
    _check_width("logit_bias", "f", list(params.logit_bias.values()))
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        _check_width(name, "f", [getattr(params, name)])
    ids = [*params.logit_bias, *(params.allowed_token_ids or ()), *params.stop_token_ids]
    ids += [token_id for word in params.bad_words_token_ids for token_id in word]
    _check_width("token ids", "q", ids)
    if ids and min(ids) < 0:
        raise ValueError(f"token id {min(ids)} is negative: it would be a place in another request's logits")


def check_token_ids(token_ids: Sequence[int]) -> None:
    """A row of the token table is int32. Raises ValueError."""
    try:
        array("i", token_ids)
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"token ids do not fit the token table: {exc}") from None


def _check_width(name: str, width: str, values: Sequence[float]) -> None:
    try:
        struct.pack(f"={len(values)}{width}", *values)
    except (OverflowError, struct.error, TypeError) as exc:
        raise ValueError(f"{name} does not fit its table ({exc})") from None
