"""What the end-to-end tests share: the built-in model, a tiny one, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def smollm2_files() -> Any:
    """The built-in model, fetched on first use."""
    from aioengine.models.info import resolve_model

    return resolve_model("smollm2", progress=False)


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_files: Any) -> Any:
    """transformers' model, filled from the same GGUF file by the gguf package's own reader, in float32."""
    from tests.models.support import reference_from_gguf

    return reference_from_gguf(smollm2_files).eval()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer, as a folder that any engine can load."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.tiny_tokenizer import byte_level_tokenizer

    folder = tmp_path_factory.mktemp("tiny_llama")
    tokenizer = byte_level_tokenizer(["<eos>", "<bos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.5,  # far from uniform logits: no ties between the best tokens
        eos_token_id=0,
        bos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def greedy_gaps(model: Any, prompt_token_ids: list[int], output_token_ids: list[int]) -> list[float]:
    """For each output token, how far its logit is below the oracle's best one, given the same history.

    All zeros means: this is token for token the oracle's own greedy output (by induction over the positions).
    """
    history = torch.tensor([prompt_token_ids + output_token_ids])
    with torch.inference_mode():
        logits = model(history, logits_to_keep=len(output_token_ids) + 1).logits[0, :-1].float()
    chosen = logits.gather(1, torch.tensor(output_token_ids)[:, None])[:, 0]
    gaps: list[float] = (logits.max(dim=1).values - chosen).tolist()
    return gaps


@pytest.fixture(scope="session")
def oracle_gaps() -> Callable[[Any, list[int], list[int]], list[float]]:
    return greedy_gaps
