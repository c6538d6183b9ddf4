"""Where a resolved model lies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """folder: config.json, tokenizer.json, generation_config.json. weights: all files of one model, in any order."""

    name: str
    folder: Path
    weights: tuple[Path, ...]
    format: Literal["gguf", "safetensors"]
