"""Masks against brute force: a token is allowed exactly if some text that matches begins with the text so far and the token."""

from __future__ import annotations

import itertools
import random
import re
from functools import cache

import pytest

from aioengine.sampling_params import SamplingParams, StructuredOutputsParams
from aioengine.structured_output.manager import StructuredOutputManager

TOKENS = [b"a", b"b", b"c", b"ab", b"ba", b"aa", b"bc", b"abc", b"cab", b"<eos>", b"<end>", b"", b"bb"]
EOS_TOKEN_IDS = frozenset({9, 10})
MAX_CHARS = 9


class SmallVocabulary:
    """Tokens of one to three letters, so that a text has many ways to be written."""

    vocab_size = len(TOKENS)
    special_token_ids = EOS_TOKEN_IDS

    def token_bytes(self) -> list[bytes]:
        return TOKENS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ["abc".index(letter) for letter in text]


def allowed(bitmask: bytes) -> set[int]:
    return {token_id for token_id in range(len(bitmask) * 8) if bitmask[token_id // 8] >> token_id % 8 & 1}


@cache
def texts() -> list[str]:
    """Every text of up to MAX_CHARS letters."""
    return ["".join(letters) for length in range(MAX_CHARS + 1) for letters in itertools.product("abc", repeat=length)]


REGEXES = [
    "abc",
    "a*b",
    "(ab|ba)*c",
    "[ab]{2,4}",
    "a(b|c)?a+",
    "(a|ab)(c|bc)",
    "(aab|abb)c*",
    "(abc)?",
    "c+(ab)?c",
    "((a|b)c){0,2}a",
    ".*ca",
    "[^a]b?",
]


@pytest.mark.parametrize("regex", REGEXES)
async def test_a_mask_is_what_brute_force_finds(regex: str) -> None:
    """The texts are cut two letters after the longest prefix, by when each of these expressions can be completed."""
    matching = [text for text in texts() if re.fullmatch(regex, text)]
    prefixes = {text[:length] for text in matching for length in range(len(text) + 1)}
    manager = StructuredOutputManager(SmallVocabulary(), vocab_size=len(TOKENS), eos_token_ids=EOS_TOKEN_IDS)
    grammar = await manager.compile(StructuredOutputsParams(regex=regex))
    rng = random.Random(regex)
    num_masks = 0
    for _ in range(60):
        matcher = grammar.start(SamplingParams())
        text = ""
        while len(text) <= MAX_CHARS - 5:
            mask = allowed(matcher.bitmask())
            expected = {i for i, token in enumerate(TOKENS) if token and i not in EOS_TOKEN_IDS and text + token.decode() in prefixes}
            if text in matching:
                expected |= EOS_TOKEN_IDS
            next_letters = {prefix[len(text)] for prefix in prefixes if len(prefix) > len(text) and prefix.startswith(text)}
            if mask != expected:
                # Letters that have no alternative are written as the tokenizer would write them.
                assert mask < expected
                assert mask
                assert len(next_letters) == 1
                assert text not in matching
            num_masks += 1
            token_id = rng.choice(sorted(mask))
            matcher.accept([token_id])
            if token_id in EOS_TOKEN_IDS:
                assert re.fullmatch(regex, text)
                assert allowed(matcher.bitmask()) == EOS_TOKEN_IDS
                break
            text += TOKENS[token_id].decode()
            assert text in prefixes
    assert num_masks > 60
    manager.shutdown()
