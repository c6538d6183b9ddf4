"""Qwen3: no biases, RMSNorm on each query and key head, and a head size that is not hidden_size / num_heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.models.config import DecoderConfig, decoder_config, flag, qwen_sliding_window
from aioengine.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        bias = flag(raw, "attention_bias")
        defaults = {"vocab_size": 151936, "max_position_embeddings": 32768, "head_dim": 128}
        window = qwen_sliding_window(raw)
        return decoder_config(raw, defaults=defaults, qkv_bias=bias, output_bias=bias, qk_norm=True, sliding_window=window)
