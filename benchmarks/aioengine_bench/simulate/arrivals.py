"""The requests of a simulation. A prompt is a length and the names of its blocks: no token of it is ever looked at."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.core.block_hash import hash_block, root_hash
from aioengine.request import Request
from aioengine.sampling_params import SamplingParams

_NAME = struct.Struct(">IH")  # six bytes: what a recording keeps of a hash
_MAX_PLACES = 1 << 16
_MAX_NAME = (1 << 31) - 1
_OWN = 1 << 31  # of names that no other request has
_FIRST_OWN_ID = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """time: seconds after the start. content: names of stretches of `content_size` tokens, equal where the whole prefix up to there is;
    the rest of the prompt, or all of it without any, is like nobody else's. block_hashes: the same in the form of a recording.
    """

    index: int
    time: float
    prompt_len: int
    max_tokens: int
    priority: int = 0
    content: Sequence[int] = ()
    content_size: int = 0
    block_hashes: Sequence[bytes] = ()

    @property
    def request_id(self) -> str:
        return f"r{self.index}"

    def make_request(self, *, block_size: int) -> Request:
        """As the engine would hand it to the scheduler; it goes on to its length."""
        return Request(
            self.request_id,
            [0] * (self.prompt_len - 1) + [self.index + _FIRST_OWN_ID],  # so that what follows is like nothing else
            sampling_params=SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0, seed=0),
            arrival_time=self.time,
            priority=self.priority,
            block_hashes=self.hashes(block_size),
        )

    def hashes(self, block_size: int) -> list[bytes]:
        """One for each full block of the prompt."""
        num_blocks = self.prompt_len // block_size
        hashes = list(self.block_hashes[:num_blocks])
        pack = _NAME.pack
        if not hashes and self.content_size:
            per_name = self.content_size // block_size
            for name in self.content:
                hashes += [pack(name & _MAX_NAME, place % _MAX_PLACES) for place in range(per_name)]
            del hashes[num_blocks:]
        hashes += [pack(_OWN | (self.index & _MAX_NAME), place % _MAX_PLACES) for place in range(len(hashes), num_blocks)]
        return hashes


def block_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The real ones of a prompt's full blocks, so that prompts share what they have in common."""
    hashes: list[bytes] = []
    parent = root_hash("simulate")
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
