"""Names for the content of KV blocks: a sha256 chain, so equal names mean equal token prefixes.

hash[i] = sha256(hash[i-1] + tokens of block i + extra keys). A cryptographic hash makes a collision, and with it another
request's answer, practically impossible; a random root makes the names unpredictable between processes, so that nobody
can probe what others asked. (vLLM V1 uses the same scheme.)
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from hashlib import sha256

BlockHash = bytes

_DIGEST_BYTES = 32
_TOKEN_BYTES = 8


def root_hash(seed: str | None) -> BlockHash:
    """The parent of every first block. The same seed gives the same hashes in every process; None: a random root."""
    return sha256(os.urandom(32) if seed is None else b"aioengine:" + seed.encode()).digest()


def salt_bytes(cache_salt: str | None, lora_key: str | None = None) -> bytes:
    """The extra key of a request's first block; later ones inherit it through the chain. No two pairs give the same bytes.

    lora_key: names an adapter and its content.
    """
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode(errors="surrogatepass")
    if lora_key is None:
        return salt
    key = lora_key.encode(errors="surrogatepass")
    return b"lora:" + len(key).to_bytes(4, "big") + key + salt


def hash_block(parent: BlockHash, token_ids: Sequence[int], *, extra: bytes = b"") -> BlockHash:
    """The hash of one full block. `extra` separates contents that must not be shared though their tokens are equal."""
    return sha256(parent + _as_bytes(token_ids) + extra).digest()


def hash_blocks(parent: BlockHash, token_ids: Sequence[int], *, block_size: int, extra: bytes = b"") -> list[BlockHash]:
    """The hashes of the full blocks that `token_ids` begin with, as `hash_block` gives them one by one. `extra` is the first one's.

    The tokens become bytes once: turning each block's into bytes takes as long as its hash.
    """
    return _hash_content(parent, _as_bytes(token_ids), width=_TOKEN_BYTES * block_size, extra=extra)


class HashMemo:
    """`hash_blocks` of prompts that begin alike: comparing bytes is many times as fast as hashing them.

    Of the prompts that share a first block the last one is kept, and of those the ones used last, up to a number of blocks.
    """

    def __init__(self, block_size: int, *, max_blocks: int = 32_768) -> None:
        """max_blocks: about 200 bytes each."""
        self._width = _TOKEN_BYTES * block_size
        self._max_blocks = max_blocks
        self._num_blocks = 0
        # parent, first block and extra -> the bytes of all blocks, and their hashes. The least recently used first.
        self._kept: dict[bytes, tuple[bytes, list[BlockHash]]] = {}

    def hash_blocks(self, parent: BlockHash, token_ids: Sequence[int], *, extra: bytes = b"") -> list[BlockHash]:
        """As the function does it."""
        width, content = self._width, _as_bytes(token_ids)
        if len(content) < 8 * width:  # nothing is gained, least of all for a request that decodes
            return _hash_content(parent, content, width=width, extra=extra)
        name = parent + content[:width] + extra
        old_content, old_hashes = self._kept.pop(name, (b"", []))
        end = _common_length(old_content, content, step=width)
        hashes = old_hashes[: end // width]
        if hashes:
            parent, extra = hashes[-1], b""
        hashes += _hash_content(parent, content[end:], width=width, extra=extra)
        self._num_blocks += len(hashes) - len(old_hashes)
        self._kept[name] = content, hashes
        while self._num_blocks > self._max_blocks:
            _, dropped = self._kept.pop(next(iter(self._kept)))
            self._num_blocks -= len(dropped)
        return hashes.copy()


def _common_length(first: bytes, second: bytes, *, step: int) -> int:
    """How many bytes, a multiple of `step`, both begin with."""
    num_steps = min(len(first), len(second)) // step
    length, stride = 0, num_steps
    while stride:
        end = length + stride * step
        if stride <= num_steps - length // step and first[length:end] == second[length:end]:
            length = end
        else:
            stride //= 2
    return length


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return array("Q", token_ids).tobytes()  # unsigned: the check of a sign takes four times as long


def _hash_content(parent: BlockHash, content: bytes, *, width: int, extra: bytes) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    for start in range(0, len(content) // width * width, width):
        parent = sha256(parent + content[start : start + width] + extra).digest()
        hashes.append(parent)
        extra = b""
    return hashes


def in_group(block_hash: BlockHash, group_id: int) -> BlockHash:
    """The name of that content in a KV-cache group: what its layers wrote for these tokens. In the first, the hash itself."""
    return block_hash + group_id.to_bytes(2, "big") if group_id else block_hash


def names_in_group(block_hashes: Sequence[BlockHash], group_id: int) -> Sequence[BlockHash]:
    """`in_group` of each."""
    return [in_group(block_hash, group_id) for block_hash in block_hashes] if group_id else block_hashes


def group_of(name: BlockHash) -> int:
    """The KV-cache group of a name that `in_group` made of a whole hash."""
    return int.from_bytes(name[_DIGEST_BYTES:], "big")


def short_hash(block_hash: BlockHash | None) -> str:
    """The first hex digits, for people to tell contents apart; "" for none. The same in all KV-cache groups.

    48 bits: in a pool of 100,000 contents two are alike with a probability of 2e-5.
    """
    return "" if block_hash is None else block_hash[:6].hex()
