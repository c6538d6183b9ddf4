"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.models.config import DecoderConfig, decoder_config, qwen_sliding_window
from aioengine.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        defaults = {"vocab_size": 151936, "max_position_embeddings": 32768}
        return decoder_config(raw, defaults=defaults, qkv_bias=True, sliding_window=qwen_sliding_window(raw))
