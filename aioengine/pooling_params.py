"""What a request for an embedding asks for, instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from aioengine.checks.values import shorten
from aioengine.errors import InvalidRequestError

Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the hidden states of a prompt, behind the model's last norm, become one vector.

    pooling: "mean" of all its tokens, or that of the "last" one. normalize: scale the vector to length 1.

    Raises InvalidRequestError.
    """

    pooling: Pooling = "mean"
    normalize: bool = True

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise InvalidRequestError(f'pooling must be "mean" or "last", got {shorten(self.pooling)}')
        if not isinstance(self.normalize, bool):
            raise InvalidRequestError(f"normalize must be True or False, got {shorten(self.normalize)}")

    @property
    def needs_all_tokens(self) -> bool:
        """Every token of the prompt has to go through the model: the prefix cache holds keys and values, no hidden states."""
        return self.pooling == "mean"
