"""The built-in model itself: our reading of its file against transformers'."""

from __future__ import annotations

import pytest
import torch

from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.tokenizer import Tokenizer, load_tokenizer
from aioengine.models.info import read_model_info, resolve_model
from tests.models.support import load_ours, logits_of, reference_from_gguf, reference_logits

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "Hello, world!",
    "Grüße, 世界! 🙂",
    "def f(x):\n    return x  # 42 is  7 * 6\n\n\n",
    "In 1989, 12345 people paid $3.50 for   3 cups.",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve_model("smollm2", progress=False)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return load_tokenizer(files.folder)


def test_facts(files: ModelFiles, tokenizer: Tokenizer) -> None:
    info = read_model_info(files)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert info.max_position_embeddings == 8192
    assert info.eos_token_ids == {0, 2, 4}  # as llama.cpp: <|endoftext|>, <|im_end|>, <reponame>
    assert tokenizer.vocab_size == info.vocab_size == 49152


def test_text_round_trip(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    """As in the original tokenizer, which splits digits off first: the spaces before them stay together."""
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a   12")] == ["a", "   ", "1", "2"]


def test_tokens_equal_transformers(files: ModelFiles, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(files.folder, local_files_only=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
    rendered = tokenizer.apply_chat_template(CHAT)
    assert rendered == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_logits_equal_transformers(files: ModelFiles, tokenizer: Tokenizer) -> None:
    reference = reference_from_gguf(files)
    ids = torch.tensor(tokenizer.encode(tokenizer.apply_chat_template(CHAT), add_special_tokens=False))
    expected = reference_logits(reference, ids)
    actual = logits_of(load_ours(files), ids)
    # Thirty layers of float32 rounding on logits of about 20.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
