"""Llama 2 and 3, SmolLM2, and Mistral, which is Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from aioengine.models.config import DecoderConfig, decoder_config, flag, mistral_windows
from aioengine.models.decoder import DecoderForCausalLM

_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }
)
_MISTRAL_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {**_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
)


class LlamaForCausalLM(DecoderForCausalLM):
    default_eos_token_id: ClassVar[int | None] = 2

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        bias = flag(raw, "attention_bias")
        return decoder_config(raw, defaults=_DEFAULTS, qkv_bias=bias, output_bias=bias, mlp_bias=flag(raw, "mlp_bias"))


class MistralForCausalLM(DecoderForCausalLM):
    default_eos_token_id: ClassVar[int | None] = 2

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        return decoder_config(raw, defaults=_MISTRAL_DEFAULTS, windows=mistral_windows(raw, defaults=_MISTRAL_DEFAULTS))


class MinistralForCausalLM(MistralForCausalLM):
    """Mistral in which `layer_types` says which layers have the window: transformers' name for it."""
