"""From an architecture's name in config.json to the class that runs it, imported only when asked for.

Other packages add families through the entry-point group "aioengine.models": the name is the architecture, the value
"package.module:Class", a subclass of `aioengine.models.base.CausalLM`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from aioengine.errors import ModelError
from aioengine.models.base import CausalLM

ENTRY_POINT_GROUP = "aioengine.models"
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "aioengine.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "aioengine.models.llama:MistralForCausalLM",
        "Qwen2ForCausalLM": "aioengine.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "aioengine.models.qwen3:Qwen3ForCausalLM",
    }
)


def find_model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture. Raises ModelError for an unknown one, listing the known, or a plugin that fails."""
    target = BUILT_IN.get(architecture)
    if target is None:
        plugins = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)}
        target = plugins.get(architecture)
        if target is None:
            known = ", ".join(sorted({*BUILT_IN, *plugins}))
            raise ModelError(f"architecture {architecture!r} is not supported; supported: {known}")
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot load {target} for architecture {architecture!r}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, CausalLM):
        raise ModelError(f"{target}, registered for architecture {architecture!r}, is not a CausalLM")
    return found
