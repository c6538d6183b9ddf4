"""Fixtures of this folder and of tests/checkpoint: tiny model files that are in order, for tests that damage them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from aioengine.checkpoint import tokenizer_files
from tests.models.untrusted import (
    tensors,
    write_config,
    write_gguf,
)


@pytest.fixture(scope="session", autouse=True)
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenizers of test folders do not go to the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_files, "cache_folder", lambda: folder)
        yield


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_config(folder)
    write_gguf(folder / "m.gguf")
    return folder


@pytest.fixture(scope="module")
def safetensors_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safetensors")
    write_config(folder)
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def scratch(tmp_path: Path, gguf_folder: Path, safetensors_folder: Path) -> Path:
    """Both models, to damage."""
    shutil.copytree(gguf_folder, tmp_path / "gguf")
    shutil.copytree(safetensors_folder, tmp_path / "safetensors")
    return tmp_path
