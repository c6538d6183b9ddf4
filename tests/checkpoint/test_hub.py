"""Names to files: what is found, what is refused, and with which words."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aioengine.checkpoint import hub
from aioengine.checkpoint.cache import cache_folder
from aioengine.checkpoint.hub import ALIASES
from aioengine.errors import ModelError
from aioengine.models.info import pull, resolve_model
from tests.models.support import cases, random_model, save


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("AIOENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/aioengine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "aioengine"


def test_unknown_names_list_what_was_tried(cache: Path) -> None:
    with pytest.raises(
        ModelError, match=r"unknown model 'smolm2'.*built-in alias \(gemma3-270m, smollm2\).*Hugging Face.*Did you mean \"smollm2\""
    ):
        resolve_model("smolm2")
    with pytest.raises(ModelError, match=r"unknown model './nothing'") as caught:
        resolve_model("./nothing")
    assert "Hugging Face" not in str(caught.value)
    with pytest.raises(ModelError, match=r"unknown model 'models/missing\.gguf'"):
        resolve_model("models/missing.gguf")


def test_folders(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"neither \.safetensors nor \.gguf"):
        resolve_model(str(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pickled weights only"):
        resolve_model(str(folder))
    files = save(random_model(cases()["llama"]), folder)
    assert resolve_model(str(folder)).weights == files.weights
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(folder))


def test_sharded_folders_must_be_whole(tmp_path: Path, cache: Path) -> None:
    files = save(random_model(cases()["llama"]), tmp_path, max_shard_size="60KB")
    files.weights[1].unlink()
    with pytest.raises(ModelError, match=f"lacks {files.weights[1].name}"):
        resolve_model(str(tmp_path))


def test_several_gguf_files_and_other_files_are_refused(tmp_path: Path, cache: Path) -> None:
    for name in ("a.gguf", "b.gguf", "model.bin"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=r"2 \.gguf files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(tmp_path / "a.gguf"))


def test_an_alias_that_is_not_here_and_may_not_be_fetched(cache: Path) -> None:
    with pytest.raises(ModelError, match="run `aioengine pull smollm2` first"):
        resolve_model("smollm2", allow_download=False)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("AIOENGINE_CACHE", str(blocker / "cache"))
    with pytest.raises(ModelError, match="Set AIOENGINE_CACHE"):
        resolve_model("smollm2")


def test_two_at_once_fetch_and_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ALIASES["smollm2"]
    fetched: list[Path] = []

    def fake_fetch(source: object, target: Path, **_: object) -> None:
        fetched.append(target)
        with target.open("wb") as file:
            file.truncate(ALIASES["smollm2"].size)

    def fake_convert(path: Path, folder: Path, **_: object) -> None:
        (folder / "aioengine.json").write_text('{"version": 1}')

    monkeypatch.setattr(hub, "fetch_parts", fake_fetch)
    monkeypatch.setattr(hub, "convert_gguf", fake_convert)
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(resolve_model("smollm2"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1
    assert len(results) == 3
    assert fetched[0].name == source.name


def test_pull_replaces_a_damaged_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Path] = []

    def fake_fetch(source: object, target: Path, **_: object) -> None:
        fetched.append(target)
        with target.open("wb") as file:
            file.truncate(ALIASES["smollm2"].size)

    monkeypatch.setattr(hub, "fetch_parts", fake_fetch)
    monkeypatch.setattr(hub, "convert_gguf", lambda path, folder, **_: (folder / "aioengine.json").write_text('{"version": 1}'))
    resolve_model("smollm2")
    resolve_model("smollm2")
    assert len(fetched) == 1
    pull("smollm2")  # the right size, but not the right bytes
    assert len(fetched) == 2


def test_a_repository_that_is_not_in_the_cache_offline(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    with pytest.raises(ModelError, match=r"cannot get 'nobody/nothing' from the Hugging Face hub"):
        resolve_model("nobody/nothing", allow_download=False)


def test_a_cached_model_is_resolved_without_importing_transformers() -> None:
    code = (
        "import sys; import aioengine.checkpoint.hub, aioengine.models.loader, aioengine.checkpoint.tokenizer; "
        "sys.exit('transformers' in sys.modules or 'huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tokenizer_alone_needs_no_torch() -> None:
    code = "import sys; import aioengine.checkpoint.tokenizer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
