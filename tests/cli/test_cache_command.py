"""`aioengine cache`: what is on disk, and how it gets less."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aioengine.cli import main
from aioengine.kv_connector.file_store import FileConnector
from tests.kv_connector.conftest import KEY, block_hash, content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three segments of one block each, the first ones used longer ago."""
    for i in range(3):
        store = FileConnector(tmp_path / "kv", KEY, max_bytes=1 << 20)
        store.save([block_hash(i)], memoryview(content(i)))
        store.close()
    for age, path in enumerate(sorted((tmp_path / "kv").glob("*/*.index"), reverse=True)):
        for suffix in (".index", ".data"):
            used = path.stat().st_mtime - 10 * 86400 * (age > 0)
            os.utime(path.with_suffix(suffix), (used, used))
    return tmp_path / "kv"


def test_ls_says_what_is_kept_of_which_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:6] == ["tiny", "fast", "avx2", "float16", "3", "48"]
    assert lines[1].endswith("just now")
    assert main(["cache", "ls", "--json", str(folder)]) == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert (info["key"]["model"], info["num_blocks"], info["num_segments"]) == ("tiny", 3, 3)


def test_ls_of_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", str(tmp_path)]) == 0
    assert "no KV blocks are kept here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "left"), [(["--unused-for", "5"], 1), (["--max-bytes", "500"], 2), (["--all"], 0), (["--unused-for", "20"], 3)]
)
def test_prune_leaves_what_it_was_asked_to(folder: Path, options: list[str], left: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", *options, str(folder)]) == 0
    assert f"in {3 - left} segments" in capsys.readouterr().out
    assert len(list(folder.glob("*/*.data"))) == len(list(folder.glob("*/*.index"))) == left


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "/nowhere"], "/nowhere: there is no such folder"),
        (["prune", "/tmp"], "say what to remove"),
        (["ls", "--all", "/tmp"], "belong to prune"),
        (["prune", "--unused-for", "-1", "/tmp"], "must be days from 0 to 36500, got -1.0"),
        (["prune", "--max-bytes", "much", "/tmp"], "is not a size"),
    ],
)
def test_mistakes_get_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["cache", *argv])
    except SystemExit as exc:
        status = int(str(exc.code))
    assert status == 2
    assert message in capsys.readouterr().err
