"""Llama 2 and 3, SmolLM2, and Mistral, which is Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aioengine.models.config import DecoderConfig, decoder_config, flag, window
from aioengine.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        bias = flag(raw, "attention_bias")
        defaults = {"vocab_size": 32000, "max_position_embeddings": 2048}
        return decoder_config(raw, defaults=defaults, qkv_bias=bias, output_bias=bias, mlp_bias=flag(raw, "mlp_bias"))


class MistralForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        defaults = {"vocab_size": 32000, "max_position_embeddings": 131072, "num_key_value_heads": 8}
        # An explicit null means no window; an absent key means Mistral 7B's own.
        return decoder_config(raw, defaults=defaults, sliding_window=window(raw, default=4096))
