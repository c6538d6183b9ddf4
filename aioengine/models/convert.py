"""A GGUF file's config and tokenizer in the form transformers uses, written once into a cache folder.

transformers does the conversion; what it leaves out and the file states is added here: long-context rotary settings,
the head size, every end-of-text id, and the way SmolLM's vocabulary splits digits.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioengine.errors import ModelError
from aioengine.models.json_file import read_json

# Written last: a folder without it is an unfinished conversion. Raise the number when the conversion changes.
MARKER = "aioengine.json"
VERSION = 1
_MAX_FREQUENCIES = 1 << 12  # half of a head's size


def is_converted(folder: Path) -> bool:
    marker = folder / MARKER
    return marker.is_file() and read_json(marker).get("version") == VERSION


def convert_gguf(path: Path, folder: Path, *, files: tuple[Path, ...]) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and the chat template into `folder`.

    files: all parts of a split model, `path` the first. Takes some seconds, most of it the import of transformers.
    Raises ModelError for a broken file, an unsupported architecture or a tokenizer that cannot be converted.
    """
    from aioengine.models.gguf import ARCHITECTURES, GGUFFile

    parts = [GGUFFile(file) for file in files]
    header = parts[0].header
    if header.architecture not in ARCHITECTURES or header.number("expert_count"):
        kind = header.architecture + (" with experts" if header.number("expert_count") else "")
        raise ModelError(f"{path}: architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as name:
        temporary = Path(name)
        try:
            _save_through_transformers(path, temporary, header.metadata)
        except Exception as error:  # transformers documents no exceptions for this
            raise ModelError(f"transformers cannot convert the config and tokenizer of {path}: {error}") from error
        _complete_config(temporary, parts)
        _complete_tokenizer(path, temporary, header.metadata)
        _write(temporary / MARKER, {"version": VERSION, "source": path.name})
        _install(temporary, folder)


def _save_through_transformers(path: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    AutoConfig.from_pretrained(path.parent, **options).save_pretrained(folder)
    if str(metadata.get("tokenizer.ggml.pre")) in ("llama3", "llama-v3", "llama-bpe"):
        # Such a file that does not say otherwise wants a BOS (llama.cpp: llama_vocab::impl::load).
        options["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", True))
    AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder)


def _complete_config(folder: Path, parts: list[Any]) -> None:
    from aioengine.models.gguf import ARCHITECTURES

    header = parts[0].header
    config = read_json(folder / "config.json")
    names = {info.name for part in parts for info in part.header.tensors}
    config["architectures"] = [ARCHITECTURES[header.architecture]]
    config["tie_word_embeddings"] = "output.weight" not in names
    config["dtype"] = _natural_dtype({info.kind.name for part in parts for info in part.header.tensors})
    config.pop("_model_name_or_path", None)
    heads, hidden = header.number("attention.head_count"), header.number("embedding_length")
    if heads and hidden:
        config["head_dim"] = header.number("attention.key_length") or hidden // heads
    config["attention_bias"] = header.architecture == "llama" and "blk.0.attn_q.bias" in names
    config["rope_parameters"] = _rope_parameters(parts, config.get("rope_parameters") or {})
    _write(folder / "config.json", config)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    eos = sorted({header.metadata[key] for key in keys if isinstance(header.metadata.get(key), int)})
    generation = {"bos_token_id": config.get("bos_token_id"), "pad_token_id": config.get("pad_token_id"), "eos_token_id": eos}
    _write(folder / "generation_config.json", generation)


def _rope_parameters(parts: list[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers found (theta), with the scaling that the file states in its metadata or as a tensor of factors."""
    from aioengine.models.gguf import ROPE_FACTORS, read_vector

    header = parts[0].header
    prefix = f"{header.architecture}.rope.scaling"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}
    for part in parts:
        for info in part.header.tensors:
            if info.name == ROPE_FACTORS:
                return {**rope, "frequency_factors": read_vector(part, info, max_size=_MAX_FREQUENCIES).tolist()}
    kind = header.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return rope
    rope.update(rope_type=kind, factor=header.metadata.get(f"{prefix}.factor"))
    trained = header.metadata.get(f"{prefix}.original_context_length")
    if trained is not None:
        rope["original_max_position_embeddings"] = trained
    return rope


def _natural_dtype(kinds: set[str]) -> str:
    """What to compute in on a GPU. Block formats scale by float16 numbers, so float16 loses next to nothing."""
    if kinds <= {"F32", "F64"}:
        return "float32"
    return "bfloat16" if kinds <= {"BF16", "F32"} else "float16"


def _complete_tokenizer(path: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Two corrections to what transformers' converter makes of a byte-level vocabulary."""
    from aioengine.models.gguf import ArrayInfo

    tokenizer = read_json(folder / "tokenizer.json")
    # It adds the special tokens that GPT-2 has and this model may not have: ids past the end of the embedding table.
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, ArrayInfo) or not tokens.of_strings:
        raise ModelError(f"{path}: tokenizer.ggml.tokens must be an array of strings, got {tokens!r:.200}")
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < tokens.num_items]
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # SmolLM splits every digit off before the usual GPT-2 split; the converter does not know its name.
        digits = {"type": "Digits", "individual_digits": True}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    _write(folder / "tokenizer.json", tokenizer, indent=None)


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
