"""Mixtures of experts in GGUF files: what they are called, and the slices of tensors that hold all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """How transformers names an architecture and the parts of its layers; "{}" stands for the number of an expert."""

    architecture: str
    model_type: str
    num_experts_key: str  # of config.json
    names: Mapping[str, str]


_QWEN3 = ExpertFamily(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "num_experts",
    MappingProxyType(
        {
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        }
    ),
)
_MIXTRAL = ExpertFamily(
    "MixtralForCausalLM",
    "mixtral",
    "num_local_experts",
    MappingProxyType(
        {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        }
    ),
)
# GGUF's architecture, of a file with experts. (To GGUF a Mixtral is a llama.)
EXPERT_FAMILIES: Mapping[str, ExpertFamily] = MappingProxyType({"llama": _MIXTRAL, "qwen3moe": _QWEN3})


def expert_name(part: str, *, architecture: str) -> str | None:
    """transformers' name of a layer's part of a mixture of experts; None if it is none."""
    family = EXPERT_FAMILIES.get(architecture)
    return None if family is None else family.names.get(part)
