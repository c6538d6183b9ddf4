"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from aioengine.checkpoint.json_file import read_json
from aioengine.errors import ModelError

MAX_RANK = 64
_MAX_FILE_BYTES = 2 << 30
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
# The modules that may be adapted, and what they are in.
TARGETS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"), **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")}
)
_TENSOR = re.compile(r"(?:base_model\.model\.)?model\.layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight")
# Keys of adapter_config.json that change what is computed and are not done here -> what they ask for.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA",
        "lora_bias": "biases of the adapter",
        "fan_in_fan_out": "transposed weights",
        "modules_to_save": "modules saved whole",
        "rank_pattern": "ranks that differ between modules",
        "alpha_pattern": "alphas that differ between modules",
        "target_parameters": "adapted parameters that are no modules",
        "trainable_token_indices": "trained embeddings",
        "layer_replication": "repeated layers",
        "alora_invocation_tokens": "activated LoRA",
        "arrow_config": "a router between adapters",
        "use_qalora": "QA-LoRA",
        "use_bdlora": "block-diagonal LoRA",
    }
)
# They change the base weights too, unless PEFT converted them, and then it says so here.
_INITIALISED_FROM_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """Adds (x A^T) B^T to a module's product."""

    a: torch.Tensor  # [rank, in] float32
    b: torch.Tensor  # [out, rank] float32, times the adapter's scale


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    rank: int
    sha256: str  # of both files
    pairs: Mapping[tuple[int, str], LowRankPair]  # by layer and module: (3, "q_proj")


def read_adapter(folder: Path) -> LoraAdapter:
    """Raises ModelError naming what is missing, damaged, or not supported."""
    raw = read_json(folder / CONFIG_NAME)
    rank, scale = _read_config(folder / CONFIG_NAME, raw)
    path = folder / WEIGHTS_NAME
    content = _read_weights(path)
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode() + b"\0")
    digest.update(content)
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:  # what it raises differs between releases
        raise ModelError(f"cannot read {path}: {error}") from error
    return LoraAdapter(rank, digest.hexdigest(), _pair_up(path, tensors, rank=rank, scale=scale))


def _read_weights(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise ModelError(f"{path} has {size} bytes, more than the {_MAX_FILE_BYTES} that an adapter may have")
        return path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: save the adapter with safe_serialization=True") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _read_config(path: Path, raw: Mapping[str, Any]) -> tuple[int, float]:
    """(rank, scale)."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {raw.get('peft_type')!r:.50}, supported is LORA")
    for key, meaning in _REFUSED.items():
        if raw.get(key):
            raise ModelError(f"{path}: {key} ({meaning}) is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelError(f'{path}: bias is {raw["bias"]!r:.50}, supported is "none"')
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_INITIALISED_FROM_BASE):
        raise ModelError(f"{path}: init_lora_weights is {start!r:.50}, which changes the base weights: convert it to plain LoRA with PEFT")
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{path}: r must be an integer from 1 to {MAX_RANK}, got {rank!r:.50}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):  # type: ignore[arg-type]
        raise ModelError(f"{path}: lora_alpha must be a finite number, got {alpha!r:.50}")
    assert alpha is not None
    return rank, alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank)


def _pair_up(path: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, scale: float) -> Mapping[tuple[int, str], LowRankPair]:
    found: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or TARGETS.get(match[3]) != match[2]:
            raise ModelError(f"{path}: {name:.200} adapts what is not supported; adapters may change {', '.join(TARGETS)}")
        if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.shape[0 if match[4] == "A" else 1] != rank:
            raise ModelError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}, r is {rank}")
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{path}: {name} holds numbers that are not finite")
        found.setdefault((int(match[1]), match[3]), {})[match[4]] = tensor.float()
    for (layer, module), pair in found.items():
        if len(pair) != 2:
            raise ModelError(f"{path}: layer {layer} has lora_{next(iter(pair))} of {module} without the other half")
    if not found:
        raise ModelError(f"{path} holds no tensors")
    return {place: LowRankPair(pair["A"].contiguous(), (pair["B"] * scale).contiguous()) for place, pair in found.items()}
