"""From an architecture's name in config.json to the class that runs it, imported only when asked for.

Other packages add families through the entry-point group "aioengine.models": the name is the architecture, the value
"package.module:Class", a subclass of `aioengine.models.base.CausalLM`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from aioengine.errors import ModelError
from aioengine.models.base import CausalLM

ENTRY_POINT_GROUP = "aioengine.models"
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForCausalLM": "aioengine.models.gemma3:Gemma3ForCausalLM",
        "LlamaForCausalLM": "aioengine.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "aioengine.models.llama:MistralForCausalLM",
        "MinistralForCausalLM": "aioengine.models.llama:MinistralForCausalLM",
        "Qwen2ForCausalLM": "aioengine.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "aioengine.models.qwen3:Qwen3ForCausalLM",
    }
)
# What runs every other architecture that transformers knows; it says itself what it cannot serve.
FALLBACK = "aioengine.models.fallback.model:TransformersForCausalLM"
# `model_type` of config.json, which is what transformers goes by.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "gemma3_text": "Gemma3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "ministral": "MinistralForCausalLM",  # what transformers makes of a mistral with `layer_types`
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The architecture of a config.json: a plugin's that `architectures` names, else that of `model_type`, else the one named.

    Where `architectures` names a class that has not the layers or the head of the model's type, it is that class, which is not
    one of ours. A type that is none of ours is taken as it stands where `architectures` is missing. Raises ModelError if there is
    neither key.
    """
    names, kind = architecture_names(raw), raw.get("model_type")
    by_type = MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if by_type is None:
        if names:
            return names[0]
        if isinstance(kind, str):
            return kind
        raise ModelError("config.json names no architecture (keys 'architectures' and 'model_type')")
    if not names or by_type in names:
        return by_type
    if _is_plugin(names[0]):
        return names[0]
    same = (by_type.lower(), by_type.removesuffix("ForCausalLM").lower() + "model")  # other spellings, and the part without a head
    return by_type if names[0] in BUILT_IN or names[0].lower() in same else names[0]


def architecture_names(raw: Mapping[str, Any]) -> list[str]:
    """`architectures`, if it is a list of names."""
    names = raw.get("architectures")
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _is_plugin(architecture: str) -> bool:
    return architecture not in BUILT_IN and architecture in {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}


def find_model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture: one of ours, a plugin's, or else the one that runs transformers' own code.

    Raises ModelError for a plugin that fails.
    """
    target = BUILT_IN.get(architecture)
    if target is None:
        plugins = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
        target = plugins.get(architecture, FALLBACK)
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load {target} for architecture {architecture!r}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, CausalLM):
        raise ModelError(f"{target}, registered for architecture {architecture!r}, is not a CausalLM")
    return found
