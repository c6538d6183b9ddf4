"""From resolved files to a model with its weights in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from aioengine.attention.base import AttentionBackend
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.gguf import open_gguf
from aioengine.checkpoint.json_file import read_json
from aioengine.checkpoint.quantization import read_quantization
from aioengine.checkpoint.quantized_folder import assemble
from aioengine.checkpoint.safetensors import open_all_safetensors
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.distributed.group import SINGLE_RANK, Group
from aioengine.errors import ConfigError, ModelError
from aioengine.models.base import CausalLM
from aioengine.models.checkpoint_tensors import settle_tensors
from aioengine.models.config import DecoderConfig
from aioengine.models.decoder import DecoderForCausalLM
from aioengine.models.fallback.config import TransformersConfig
from aioengine.models.fallback.model import TransformersForCausalLM
from aioengine.models.fallback.packed import why_not_packed
from aioengine.models.native_decoder import announce_dense, build_native, why_not_native
from aioengine.models.registry import find_model_class
from aioengine.models.tensor_parallel import check_divides, rank_config, rank_tensors
from aioengine.models.weights import check_sizes
from aioengine.printable import get_logger
from aioengine.resolved_config import ModelInfo

logger = get_logger(__name__)


def load_model(
    files: ModelFiles,
    *,
    info: ModelInfo,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: AttentionBackend,
    weights: Literal["dense", "exact", "fast"] = "dense",
    allow_dense: bool = False,
    group: Group = SINGLE_RANK,
) -> CausalLM:
    """Build the model, or this rank's part of it, and read its weights, cast to `dtype`, onto `device`.

    weights: "dense" is the family's own class on PyTorch's kernels; the others as in `EngineConfig`.
    allow_dense: take "dense", with a warning, where `weights` is not possible.

    Raises ConfigError if `weights` asks for what is not possible here.
    Raises ModelError, naming the model, for damaged files and for tensors that are missing, unknown or of another shape
    than config.json implies.
    """
    family = find_model_class(info.architecture)
    config = _read_config(files, family)
    native = _is_native(
        family, config, weights=weights, allow_dense=allow_dense, attention_backend=attention_backend, dtype=dtype, device=device
    )
    try:
        tensors = list(_stored_tensors(files))  # not read yet
        with torch.no_grad():
            if issubclass(family, DecoderForCausalLM):
                config, tensors = settle_tensors(config, tensors)
                check_sizes(config, tensors)
            if native and group.rank == 0:
                announce_dense(tensors)
            if group.size > 1:
                if isinstance(config, TransformersConfig):
                    raise ConfigError(
                        f"{files.name} runs on transformers' own code, in one piece: tensor_parallel_size must be 1, got {group.size}"
                    )
                check_divides(config, group.size, name=files.name)
                config, tensors = rank_config(config, group), rank_tensors(tensors, group)
            if native:
                build = TransformersForCausalLM.build_packed if isinstance(config, TransformersConfig) else build_native
                model = build(config, attention_backend=attention_backend, fast=weights == "fast")
            else:
                model = family.build(config, attention_backend=attention_backend, dtype=dtype, device=device)
            model.join(group)
            with _one_torch_thread():
                model.load_weights(tensors)
        model.verify()
    except ModelError as error:
        raise ModelError(f"cannot load {files.name}: {error}") from error
    return model.eval()


def _read_config(files: ModelFiles, family: type[CausalLM]) -> DecoderConfig:
    try:
        return family.read_config(read_json(files.folder / "config.json"))
    except ModelError as error:
        raise ModelError(f"cannot load {files.name}: {error}") from error


def _is_native(
    family: type[CausalLM],
    config: DecoderConfig,
    *,
    weights: str,
    allow_dense: bool,
    attention_backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether weights stay packed, on the native kernels. Raises ConfigError if it was asked for by name and cannot."""
    if weights == "dense":
        return False
    if isinstance(config, TransformersConfig):
        reason = why_not_packed(config.raw, dtype=dtype, device=device)
    else:
        reason = why_not_native(family, config, backend=attention_backend, dtype=dtype, device=device)
    if reason is None:
        return True
    if not allow_dense:
        raise ConfigError(f'weights="{weights}" is not possible here: {reason}')
    if not issubclass(family, TransformersForCausalLM):  # which says so itself
        logger.warning("the model runs on PyTorch's kernels, which are several times slower on a CPU: %s", reason)
    return False


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Reading weights is thousands of small operations. Torch's thread barrier in each costs more than it gains, and on
    a machine where another process wants a core it costs milliseconds apiece (measured: 20 s instead of 0.7 s)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stored_tensors(files: ModelFiles) -> Iterable[StoredTensor]:
    if files.format != "safetensors":
        return open_gguf(files.weights)
    tensors, quantization = open_all_safetensors(files.weights), read_quantization(read_json(files.folder / "config.json"))
    return tensors if quantization is None else assemble(tensors, quantization)
