"""Which code runs a model here, and why: for people to read, before its weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aioengine.attention.base import AttentionConfig
from aioengine.attention.registry import select_attention_backend
from aioengine.checkpoint.files import ModelFiles
from aioengine.models.fallback.config import TransformersConfig
from aioengine.models.fallback.model import TransformersForCausalLM
from aioengine.models.fallback.packed import why_not_packed
from aioengine.models.info import check_config
from aioengine.models.native_decoder import why_not_native
from aioengine.models.registry import find_model_class
from aioengine.resolved_config import ResolvedConfig


@dataclass(frozen=True, slots=True)
class ModelPath:
    kind: Literal["native", "dense", "transformers"]
    reason: str


def find_path(files: ModelFiles, config: ResolvedConfig) -> ModelPath:
    """What `load_model` would do with these settings. Raises ModelError for what cannot be served."""
    architecture, decoder = check_config(files.folder)
    family, worker, model = find_model_class(architecture), config.worker, config.model
    if issubclass(family, TransformersForCausalLM):
        name = decoder.class_name if isinstance(decoder, TransformersConfig) else architecture
        packed = worker.weights != "dense" and isinstance(decoder, TransformersConfig) and _is_packed(decoder, config)
        return ModelPath(
            "transformers",
            f"there is no class here for {name}; transformers' own code runs it, over the paged cache, if a dry run at load agrees "
            f"with its eager attention; {'its weights stay packed, ' if packed else ''}slower than a family with a class of its own",
        )
    if worker.weights == "dense":
        return ModelPath("dense", f"{family.__name__} on PyTorch's kernels, as {worker.device} and dtype {worker.dtype} need it")
    dtype = getattr(torch, worker.dtype)
    shapes = AttentionConfig(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        dtype=dtype,
        kv_cache_dtype=getattr(torch, worker.kv_cache_dtype),
    )
    device = torch.device(worker.device)
    backend = select_attention_backend(worker.attention_backend, shapes, device)
    reason = why_not_native(family, decoder, backend=backend, dtype=dtype, device=device)
    if reason is not None:
        return ModelPath("dense", f"{family.__name__} on PyTorch's kernels, several times slower on a CPU: {reason}")
    return ModelPath("native", f"{family.__name__} on the native CPU kernels, with weights={worker.weights}")


def _is_packed(decoder: TransformersConfig, config: ResolvedConfig) -> bool:
    dtype, device = getattr(torch, config.worker.dtype), torch.device(config.worker.device)
    return why_not_packed(decoder.raw, dtype=dtype, device=device) is None
