"""Small vocabularies of the kinds that models have, and walks through a grammar in their tokens."""

from __future__ import annotations

import random

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from aioengine.checkpoint.tokenizer import Tokenizer
from aioengine.sampling_params import SamplingParams
from aioengine.structured_output.matcher import CompiledGrammar
from tests.tiny_tokenizer import byte_level_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<mask>")
EOS_TOKEN_ID = 2
WORDS = ("ab", "abc", "yes", "no", "im", "start", "<|", "|>", "</", "s>", '":', '{"', " a", "true", "12", "ca", "é")


def byte_level() -> Tokenizer:
    """256 bytes and no merges; special tokens, one of which takes the space before it; an added one that is no special token."""
    backend = byte_level_tokenizer(SPECIAL)
    return Tokenizer(_with_added_tokens(backend))


def composing() -> Tokenizer:
    """The same, with a normalizer that composes characters: what is written is not what was given."""
    backend = byte_level_tokenizer(SPECIAL)
    backend.normalizer = normalizers.NFC()
    return Tokenizer(_with_added_tokens(backend))


def sentencepiece() -> Tokenizer:
    """Pieces with ▁ for a space, merges, and bytes for the rest; a space is put before a text."""
    letters = sorted({char for word in WORDS for char in word if char != " "})
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        known = word[0].replace(" ", "▁")
        for char in word[1:]:
            if known + char not in pieces:
                pieces.append(known + char)
                merges.append((known, char))
            known += char
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(_with_added_tokens(backend))


def _with_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(text, lstrip=text == "<mask>", normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("hello world", normalized=False)])
    return backend


ALL = {"byte-level": byte_level, "composing": composing, "sentencepiece": sentencepiece}


def allowed(bitmask: bytes) -> list[int]:
    return [token_id for token_id in range(len(bitmask) * 8) if bitmask[token_id // 8] >> token_id % 8 & 1]


def walk(
    grammar: CompiledGrammar, tokenizer: Tokenizer, rng: random.Random, *, params: SamplingParams | None = None, max_tokens: int = 300
) -> tuple[list[int], str | None]:
    """Tokens as a model without a mind would sample them, and the text if an end token came (None: it was cut off)."""
    matcher = grammar.start(params or SamplingParams())
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        choice = allowed(matcher.bitmask())
        token_id = EOS_TOKEN_ID if EOS_TOKEN_ID in choice and rng.random() < 0.5 else rng.choice(choice)
        assert matcher.accept([token_id]) is None, tokenizer.decode([*token_ids, token_id], skip_special_tokens=False)
        if token_id == EOS_TOKEN_ID:
            return token_ids, text_of(tokenizer, token_ids)
        token_ids.append(token_id)
    return token_ids, None


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """As a user gets it: behind other text, from which no decoder drops a space."""
    before = tokenizer.encode("a", add_special_tokens=False)
    return tokenizer.decode([*before, *token_ids]).removeprefix(tokenizer.decode(before))
