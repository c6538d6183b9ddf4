"""The small JSON files around a checkpoint. Free of torch, so that the tokenizer alone loads fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aioengine.errors import ModelError

# The largest real one is a tokenizer.json: some 35 MB for a vocabulary of 256,000. Parsed it takes about ten times that.
MAX_BYTES = 256 << 20


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises ModelError naming the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ModelError(f"{path} has {size} bytes, more than the {MAX_BYTES} that such a file may have")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError naming the file and what is wrong with it."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets nested as deep
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content
