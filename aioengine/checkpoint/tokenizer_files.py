"""The files that make a tokenizer: those that this engine wrote, read as they stand, and those of a Hugging Face folder.

What a Hugging Face folder means is decided by some thousand lines of transformers: which class rebuilds tokenizer.json, which of
four files adds a token or names the BOS, which template counts. They are not written again here. transformers reads the
folder once, the result is kept in the cache under a key made of the files' content, and from then on it is read without
importing transformers, which takes seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from aioengine.checkpoint.cache import MARKER, cache_folder
from aioengine.checkpoint.json_file import MAX_BYTES, read_json, read_text
from aioengine.errors import ModelError
from aioengine.printable import get_logger

logger = get_logger(__name__)

_VERSION = 1  # of what is kept in the cache
# What transformers looks at, and the config.json whose model_type says which class reads them.
_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model", "*.model.*", "*.tiktoken", "additional_chat_templates/*.jinja")
_SOURCES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.model.*", "*.tiktoken", "tekken.json")
_WITHOUT = ("generation_config.json", "trainer_state.json")


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """What the files say. special_tokens: "bos_token" and the like -> text."""

    backend: tokenizers.Tokenizer
    chat_template: str | Mapping[str, str] | None
    special_tokens: Mapping[str, str]
    split_special_tokens: bool = False  # a special token that is written in a text is text


def is_converted_here(folder: Path) -> bool:
    """Whether this engine wrote the folder: one form, in which nothing is said twice."""
    return (folder / MARKER).is_file()


def has_tokenizer(folder: Path) -> bool:
    """Whether there is any file that a tokenizer could be made of."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _SOURCES)


def read_as_it_stands(folder: Path) -> StoredTokenizer:
    """tokenizer.json, the special tokens and the template in tokenizer_config.json or chat_template.jinja."""
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    return StoredTokenizer(backend, _template(folder, config), _special_tokens(config), backend.encode_special_tokens)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """A token is stored as text or as an object with its text in "content"."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja, else the key of tokenizer_config.json: a text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [(entry.get("name"), entry.get("template")) for entry in template if isinstance(entry, Mapping)]
        return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    return template if isinstance(template, str) else None


def read_as_transformers(folder: Path) -> StoredTokenizer:
    """What AutoTokenizer makes of the folder, from the cache if it was read before.

    A folder that transformers cannot read, but whose tokenizer.json is in order, is read as it stands, with a warning.
    Raises ModelError, or whatever tokenizers raises, for a folder that nobody can read.
    """
    if not has_tokenizer(folder):
        raise ModelError("it has neither a tokenizer.json nor another file that a tokenizer could be made of")
    kept = cache_folder() / "tokenizers" / _key(folder)
    if is_converted_here(kept):
        with contextlib.suppress(ModelError):  # damaged since: it is written anew
            return read_as_it_stands(kept)
    try:
        found = _convert(folder)
    except Exception as error:  # transformers documents no exceptions for this
        if not (folder / "tokenizer.json").is_file():
            raise
        stands = read_as_it_stands(folder)
        logger.warning(
            "transformers cannot read the tokenizer of %s, whose tokenizer.json is taken as it stands: %.300s", folder, one_line(error)
        )
        return stands
    _keep(found, kept)
    return found


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _key(folder: Path) -> str:
    """Of the content, so that copies and checkpoints of one model share an entry and a changed file makes another."""
    digest = hashlib.sha256(f"{_VERSION} {version('transformers')} {version('tokenizers')}".encode())
    paths = {path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        if path.name in _WITHOUT or path.name.endswith(".index.json") or path.stat().st_size > MAX_BYTES:
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"\n{path.relative_to(folder).as_posix()} {content}".encode())
    return digest.hexdigest()[:32]


def _convert(folder: Path) -> StoredTokenizer:
    from transformers import AutoTokenizer

    with _quiet_transformers():
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{type(theirs).__name__} cannot be converted to a tokenizer.json")
    template = theirs.chat_template
    return StoredTokenizer(
        backend,
        dict(template) if isinstance(template, Mapping) else template,
        {name: str(token) for name, token in theirs.special_tokens_map.items()},
        bool(backend.encode_special_tokens),
    )


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its warnings are about what its own user could call differently."""
    from transformers.utils import logging as their_logging

    before = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        yield
    finally:
        their_logging.set_verbosity(before)


def _keep(found: StoredTokenizer, kept: Path) -> None:
    """Write it, whole or not at all. A cache that cannot be written costs time at the next start, nothing else."""
    template = found.chat_template
    named = [{"name": name, "template": text} for name, text in template.items()] if isinstance(template, Mapping) else template
    config = {**found.special_tokens, "chat_template": named, "split_special_tokens": found.split_special_tokens}
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=kept.parent, prefix=f"{kept.name}."))
        try:
            (temporary / "tokenizer.json").write_text(found.backend.to_str(), encoding="utf-8")
            (temporary / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
            (temporary / MARKER).write_text(json.dumps({"version": _VERSION}), encoding="utf-8")
            shutil.rmtree(kept, ignore_errors=True)
            os.rename(temporary, kept)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        logger.info("the tokenizer could not be kept in the cache: %s", error)
