"""The text and the bytes of each token by itself, as `Logprob` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from aioengine import SamplingParams
from aioengine.engine.outputs.token_text import TokenTexts
from aioengine.testing import FakeTokenizer, scripted
from aioengine.testing.executor import FakeExecutor
from tests.tiny_tokenizer import byte_level_tokenizer


class WithBackend(FakeTokenizer):
    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def sentence_pieces() -> Tokenizer:
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "the", "\u2581", "\u00e9"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return backend


def test_a_piece_of_a_character_has_bytes_and_no_text() -> None:
    backend = byte_level_tokenizer(["<eos>"])
    texts = TokenTexts(WithBackend(backend))
    found = [texts.of(token_id) for token_id in backend.encode(" \u20ac", add_special_tokens=False).ids]
    assert [text.bytes for text in found] == [b" ", b"\xe2", b"\x82", b"\xac"]
    assert [text.text for text in found] == [" ", "\ufffd", "\ufffd", "\ufffd"]
    assert texts.of(0) == ("<eos>", b"<eos>")
    assert {texts.of(token_id).bytes for token_id in range(1, 257)} == {bytes([byte]) for byte in range(256)}


def test_byte_fallback_vocabularies_keep_their_spaces() -> None:
    backend = sentence_pieces()
    texts, ids = TokenTexts(WithBackend(backend)), backend.get_vocab()
    assert texts.of(ids["\u2581the"]) == (" the", b" the")
    assert texts.of(ids["the"]) == ("the", b"the")
    assert texts.of(ids["<0xE2>"]) == ("\ufffd", b"\xe2")
    assert texts.of(ids["\u00e9"]) == ("\u00e9", "\u00e9".encode())
    assert texts.of(ids["</s>"]) == ("</s>", b"</s>")


class DecodesOnly(FakeTokenizer):
    token_bytes = None  # type: ignore[assignment]


def test_what_a_tokenizer_does_not_tell_is_none_and_nothing_fails() -> None:
    texts = TokenTexts(DecodesOnly())
    assert texts.of(97) == ("a", b"a")
    assert texts.of(0xE2) == ("\ufffd", None)
    assert texts.of(10**6) == ("", None)
    padded = TokenTexts(WithBackend(byte_level_tokenizer(["<eos>"])))
    assert padded.of(5000) == ("", b"")
    with_bytes = TokenTexts(FakeTokenizer())
    assert with_bytes.of(0xE2) == ("\ufffd", b"\xe2")
    assert with_bytes.of(256) == ("<eos>", b"<eos>")


@pytest.mark.parametrize("detokenize", [True, False])
async def test_logprobs_of_outputs_and_prompts_have_both(start_rig: Any, detokenize: bool) -> None:
    executor = FakeExecutor(num_blocks=129, block_size=4, next_token=scripted("\u20acx"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1, detokenize=detokenize)
    async with start_rig(executor) as rig:
        (output,) = await rig.engine.generate_batch([[97, 0xE2, 98]], params)
        assert output.outputs[0].logprobs is not None
        first = [next(iter(entry.items())) for entry in output.outputs[0].logprobs]
        data = [entry.token_bytes for _, entry in first]
        assert output.prompt_logprobs is not None
        prompt = [None if entry is None else next(iter(entry.values())).token_bytes for entry in output.prompt_logprobs]
        if not detokenize:
            assert data == [None] * 4
            return
        assert data == [b"\xe2", b"\x82", b"\xac", b"x"]
        assert [entry.decoded_token for _, entry in first] == ["\ufffd", "\ufffd", "\ufffd", "x"]
        assert prompt == [None, b"\xe2", b"b"]
