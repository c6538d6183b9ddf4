"""Where a resolved model lies on disk, and the facts that its small files state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aioengine.config import ModelInfo
from aioengine.errors import ModelError
from aioengine.models.gguf import GGUFFile
from aioengine.models.json_file import read_json
from aioengine.models.registry import find_model_class

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """folder: config.json, tokenizer.json, generation_config.json. weights: all files of one model, in any order."""

    name: str
    folder: Path
    weights: tuple[Path, ...]
    format: Literal["gguf", "safetensors"]


def read_model_info(files: ModelFiles) -> ModelInfo:
    """The model's facts, from config.json and generation_config.json.

    Raises ModelError for a missing or broken config.json and for an architecture that is not supported.
    """
    raw = read_json(files.folder / "config.json")
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{files.folder / 'config.json'} names no architecture (key 'architectures')")
    family = find_model_class(names[0])
    try:
        config = family.read_config(raw)
    except ModelError as error:
        raise ModelError(f"{files.folder}: {error}") from error
    generation_path = files.folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    # transformers stops at generation_config's ids if it states any, else at config's.
    eos = generation.get("eos_token_id") if generation.get("eos_token_id") is not None else raw.get("eos_token_id")
    bos = _token_ids(raw.get("bos_token_id"), "bos_token_id", files.folder, config.vocab_size)
    return ModelInfo(
        name=files.name,
        path=str(files.folder),
        architecture=names[0],
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=_stored_dtype(raw),
        eos_token_ids=_token_ids(eos, "eos_token_id", files.folder, config.vocab_size),
        bos_token_id=min(bos, default=None),
        sliding_window=config.sliding_window,
        is_quantized=files.format == "gguf" and any(GGUFFile(path).is_quantized for path in files.weights),
    )


def _stored_dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return name if name in _DTYPES else "float32"


def _token_ids(value: Any, key: str, folder: Path, vocab_size: int) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        raise ModelError(f"{folder}: {key} must be a token id or a list of them, below vocab_size ({vocab_size}), got {value!r:.200}")
    return frozenset(ids)
