"""The smallest tokenizer that takes every text: one token a byte, after a few special ones."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def byte_level_tokenizer(special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Ids: the special tokens in their order, then the 256 bytes in the order of their symbols. No merges."""
    vocab = {symbol: index for index, symbol in enumerate([*special_tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
