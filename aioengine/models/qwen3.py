"""Qwen3: no biases, RMSNorm on each query and key head, and a head size that is not hidden_size / num_heads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aioengine.models import qwen2
from aioengine.models.config import DecoderConfig, decoder_config, flag, qwen_windows
from aioengine.models.decoder import DecoderForCausalLM

DEFAULTS: Mapping[str, Any] = MappingProxyType({**qwen2.DEFAULTS, "head_dim": 128})


class Qwen3ForCausalLM(DecoderForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        bias = flag(raw, "attention_bias")
        windows = qwen_windows(raw, defaults=DEFAULTS)
        return decoder_config(raw, defaults=DEFAULTS, windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
