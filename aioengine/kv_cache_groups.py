"""KV-cache groups: layers that share a block table, over one pool of blocks that fit any of them.

Layers that see everything and layers with a window need different blocks of a request: the first all of them, the others the
last few. So each kind has tables of its own. All groups have the same number of layers, hence every block the same number of
bytes, and one pool serves all: a block belongs to whichever group it was handed out for. (vLLM's hybrid KV cache manager
groups layers in the same way.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """The layers of one block table, by number, in the order in which they lie in each block."""

    layers: tuple[int, ...]
    sliding_window: int | None = None  # a query sees the last `sliding_window` positions, its own included; None: all

    def first_block_in_sight(self, num_computed_tokens: int, *, block_size: int) -> int:
        """The first block of a table that the next token still reads; those before it lie wholly behind the window."""
        if self.sliding_window is None or num_computed_tokens < self.sliding_window:
            return 0
        return (num_computed_tokens - self.sliding_window + 1) // block_size

    def max_num_blocks(self, num_tokens: int, *, block_size: int, max_step_tokens: int, num_computed_tokens: int = 0) -> int:
        """The most blocks that a request holds at once here on its way to `num_tokens`, in steps of `max_step_tokens` at most.

        A step needs blocks for its tokens and for what the first of them sees; they may begin anywhere in a block.
        """
        num_blocks = -(-num_tokens // block_size) - self.first_block_in_sight(num_computed_tokens, block_size=block_size)
        if self.sliding_window is None:
            return num_blocks
        num_tokens_at_once = self.sliding_window - 1 + max_step_tokens
        return min(num_blocks, 1 + -(-(num_tokens_at_once - 1) // block_size))


def group_layers(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """Groups for layers with these windows; those that see everything come first, then by window.

    Every group has as many layers as the rarest kind, so that few places of a block stay empty; the last group of a kind may
    have fewer. With 15 windowed layers and 3 full ones: one full group and five windowed ones, of 3 layers each.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = min(len(layers) for layers in kinds.values())
    return tuple(
        KVCacheGroup(tuple(layers[first : first + size]), window)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(layers), size)
    )


def num_layer_caches(groups: Sequence[KVCacheGroup]) -> int:
    """How many layers' worth of memory one block takes: the i-th layers of all groups share one cache."""
    return max(len(group.layers) for group in groups)


def num_blocks_of_request(groups: Sequence[KVCacheGroup], num_tokens: int, *, block_size: int, max_step_tokens: int) -> int:
    """The most blocks of the pool that a request of so many tokens holds at once, in all groups together."""
    return sum(group.max_num_blocks(num_tokens, block_size=block_size, max_step_tokens=max_step_tokens) for group in groups)


def longest_request(groups: Sequence[KVCacheGroup], num_blocks: int, *, block_size: int, max_step_tokens: int, limit: int) -> int:
    """How many tokens of one request, `limit` at most, so many blocks hold. 0: not even one block for each group."""

    def blocks_of(num_tokens: int) -> int:
        return num_blocks_of_request(groups, num_tokens, block_size=block_size, max_step_tokens=max_step_tokens)

    return bisect_right(range(limit + 1), num_blocks, key=blocks_of) - 1


def group_of_layers(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """The number of each layer's group."""
    return _by_layer(groups, [[number] * len(group.layers) for number, group in enumerate(groups)])


def place_of_layers(groups: Sequence[KVCacheGroup]) -> tuple[int, ...]:
    """Each layer's place in its group: which of the caches it shares with the layers at that place in other groups."""
    return _by_layer(groups, [range(len(group.layers)) for group in groups])


def _by_layer(groups: Sequence[KVCacheGroup], values: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """`values` has the form of the groups' layers."""
    found: dict[int, int] = {}
    for group, of_group in zip(groups, values, strict=True):
        found.update(zip(group.layers, of_group, strict=True))
    return tuple(found[layer] for layer in range(len(found)))
