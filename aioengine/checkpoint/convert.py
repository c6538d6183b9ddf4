"""A GGUF file's config and tokenizer in the form transformers uses, written once into a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioengine.checkpoint.cache import MARKER
from aioengine.checkpoint.json_file import read_json
from aioengine.errors import ModelError

VERSION = 3  # raised when the conversion changes
_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "mask": "mask_token"}


def is_converted(folder: Path) -> bool:
    marker = folder / MARKER
    return marker.is_file() and read_json(marker).get("version") == VERSION


def convert_gguf(path: Path, folder: Path, *, files: tuple[Path, ...]) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and the chat template into `folder`.

    files: all parts of a split model, `path` the first. Takes a second or two for a large vocabulary.
    Raises ModelError for a broken file, and for one that says something which this engine would not do.
    """
    from aioengine.checkpoint.gguf import GGUFFile
    from aioengine.checkpoint.gguf_config import check_file, config_json
    from aioengine.checkpoint.gguf_tokenizer import tokenizer_json
    from aioengine.checkpoint.gguf_vocabulary import read_vocabulary
    from aioengine.checkpoint.tokenizer import load_tokenizer

    parts = [GGUFFile(file) for file in files]
    check_file(parts)
    metadata = parts[0].header.metadata
    vocabulary = read_vocabulary(parts[0])
    config = config_json(parts, vocabulary)
    tokenizer = tokenizer_json(vocabulary, path=path, model_name=str(metadata.get("general.name", "")))
    special = {name: vocabulary.tokens[vocabulary.special[key]] for key, name in _SPECIAL_TOKENS.items() if key in vocabulary.special}
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as name:
        temporary = Path(name)
        _write(temporary / "config.json", config)
        _write(temporary / "generation_config.json", {**ids, "eos_token_id": sorted(vocabulary.ends)})
        _write(temporary / "tokenizer.json", tokenizer, indent=None)
        _write(temporary / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
        template = metadata.get("tokenizer.chat_template", metadata.get("tokenizer.chat_template.default"))
        if isinstance(template, str):
            (temporary / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write(temporary / MARKER, {"version": VERSION, "source": path.name})
        _check_ids(load_tokenizer(temporary).backend.get_vocab(), path=path, vocab_size=config["vocab_size"])
        _install(temporary, folder)


def _check_ids(ids: Mapping[str, int], *, path: Path, vocab_size: int) -> None:
    """Whatever the tokenizer makes of a text must be a row of the embedding."""
    text, token = max(ids.items(), key=lambda item: item[1])
    if token >= vocab_size:
        raise ModelError(f"{path}: the token {text!r:.200} has the id {token}, the model only {vocab_size}")


def _write(path: Path, content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def _install(temporary: Path, folder: Path) -> None:
    """Move the files over, the marker last: a reader that sees it sees all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).unlink(missing_ok=True)
    for file in sorted(temporary.iterdir(), key=lambda file: file.name == MARKER):
        target = folder / file.name
        staged = target.with_name(f"{file.name}.{os.getpid()}.tmp")
        shutil.copyfile(file, staged)
        os.replace(staged, target)
