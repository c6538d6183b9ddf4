"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aioengine.models.config import DecoderConfig, decoder_config, qwen_windows
from aioengine.models.decoder import DecoderForCausalLM

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    }
)


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        return decoder_config(raw, defaults=DEFAULTS, windows=qwen_windows(raw, defaults=DEFAULTS), qkv_bias=True)
