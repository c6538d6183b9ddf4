"""Blocks on disk: they come back as they were or not at all, whatever happened to the files."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aioengine.errors import ConfigError
from aioengine.kv_connector.base import KVConnector
from aioengine.kv_connector.folder import list_stores, open_folder, prune, read_seed
from aioengine.kv_connector.memory import MemoryConnector
from tests.kv_connector.conftest import BLOCK_BYTES, KEY, OpenStore, block_hash, content, save


def files(tmp_path: Path, suffix: str) -> list[Path]:
    return sorted((tmp_path / "kv").glob(f"*/*{suffix}"))


def wait_until_found(store: KVConnector, hashes: list[bytes], num: int) -> None:
    deadline = time.monotonic() + 10
    while store.num_found(hashes) != num:
        assert time.monotonic() < deadline, f"{store.num_found(hashes)} of {num} blocks are found"
        time.sleep(0.02)


def test_blocks_outlive_the_process_that_saved_them(open_store: OpenStore, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.kv_connector.conftest import *\n"
        "store = FileConnector(Path(sys.argv[1]), KEY, max_bytes=1 << 20); save(store, 0, 5)\n"
        "import os; os._exit(1)"  # without closing anything
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "kv")], check=False, cwd=Path(__file__).resolve().parents[2])
    store = open_store()
    hashes = [block_hash(i) for i in range(7)]
    assert store.num_found(hashes) == 5
    assert store.load(hashes).result(10) == [content(i) for i in range(5)]


@pytest.mark.parametrize("connector", ["files", "memory"])
def test_the_first_gap_ends_what_is_found(open_store: OpenStore, connector: str) -> None:
    store: KVConnector = open_store() if connector == "files" else MemoryConnector()
    for i in (0, 1, 3):
        store.save([block_hash(i)], memoryview(content(i)))
    store.flush().result(10)
    hashes = [block_hash(i) for i in range(4)]
    assert store.num_found(hashes) == 2
    assert store.select_missing(hashes) == [False, False, True, False]
    assert store.load(hashes).result(10) == [content(0), content(1)]
    assert store.stats().num_saved_blocks == 3
    assert store.stats().num_loaded_blocks == 2


def test_a_block_is_written_once(open_store: OpenStore) -> None:
    store = open_store()
    save(store, 0, 3)
    save(store, 0, 3)
    assert store.stats().num_saved_blocks == 3


def test_another_process_s_blocks_are_found_without_opening_the_store_again(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    hashes = save(first, 0, 4)
    wait_until_found(second, hashes, 4)
    assert second.load(hashes).result(10) == [content(i) for i in range(4)]


@pytest.mark.parametrize("suffix", [".data", ".index"])
def test_a_file_cut_off_at_any_byte_gives_right_blocks_or_none(open_store: OpenStore, tmp_path: Path, suffix: str) -> None:
    save(open_store(), 0, 3)
    (path,) = files(tmp_path, suffix)
    whole = path.read_bytes()
    hashes = [block_hash(i) for i in range(3)]
    num_right = []
    for size in range(0, len(whole), 1 if suffix == ".index" else 8):
        path.write_bytes(whole[:size])
        store = open_store()
        loaded = store.load(hashes).result(10)
        assert loaded == [content(i) for i in range(len(loaded))]
        num_right.append(len(loaded))
        store.close()
    assert num_right == sorted(num_right), "more bytes give more blocks"
    assert (num_right[0], num_right[-1]) == (0, 2)


@pytest.mark.parametrize("suffix", [".data", ".index"])
def test_a_flipped_bit_anywhere_gives_right_blocks_or_none(open_store: OpenStore, tmp_path: Path, suffix: str) -> None:
    save(open_store(), 0, 3)
    (path,) = files(tmp_path, suffix)
    whole = path.read_bytes()
    hashes = [block_hash(i) for i in range(3)]
    num_lost = 0
    step = 1 if suffix == ".index" else 8
    for at in range(0, len(whole), step):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        store = open_store()
        for i in range(3):
            loaded = store.load([hashes[i]]).result(10)
            assert loaded in ([], [content(i)])
            num_lost += not loaded
        store.close()
    # Every byte but the data file's header stands for some block; the header of the index stands for all three.
    assert num_lost == (3 * BLOCK_BYTES // step if suffix == ".data" else 40 * 3 + 3 * 48)


def test_a_damaged_block_is_counted_forgotten_and_saved_anew(open_store: OpenStore, tmp_path: Path) -> None:
    save(open_store(), 0, 2)
    (path,) = files(tmp_path, ".data")
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    store = open_store()
    hashes = [block_hash(0), block_hash(1)]
    assert store.num_found(hashes) == 2, "what is damaged is only seen when it is read"
    assert store.load(hashes).result(10) == [content(0)]
    assert store.stats().num_damaged_blocks == 1
    assert store.num_found(hashes) == 1
    save(store, 1, 2)
    assert store.load(hashes).result(10) == [content(0), content(1)]


def test_foreign_files_are_left_alone(open_store: OpenStore, tmp_path: Path) -> None:
    save(open_store(), 0, 1)
    folder = files(tmp_path, ".index")[0].parent
    (folder / "holiday.index").write_bytes(b"not an index" * 50)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "photos").mkdir()
    store = open_store(max_bytes=1 << 12)
    assert store.num_found([block_hash(0)]) == 1
    assert store.stats().num_stored_blocks == 1
    assert [info.key for info in list_stores(tmp_path / "kv")] == [KEY]
    assert (folder / "notes.txt").read_text() == "mine"
    assert (tmp_path / "kv" / "photos").is_dir()


@pytest.mark.parametrize(
    "other", [{"weights": "exact"}, {"isa": "avx512"}, {"model_sha256": "00" * 32}, {"kv_cache_dtype": "int8"}, {"root": "ef" * 8}]
)
def test_blocks_of_another_key_are_never_found(open_store: OpenStore, tmp_path: Path, other: dict[str, Any]) -> None:
    hashes = save(open_store(), 0, 2)
    stranger = open_store(key=dataclasses.replace(KEY, **other))
    assert stranger.num_found(hashes) == 0
    # Not even if somebody moves the files there.
    target = next(path for path in (tmp_path / "kv").iterdir() if path.is_dir() and not list(path.glob("*.index")))
    for path in (*files(tmp_path, ".index"), *files(tmp_path, ".data")):
        path.rename(target / path.name)
    assert open_store(key=stranger.key).num_found(hashes) == 0


def test_another_name_of_the_model_is_no_other_key(open_store: OpenStore) -> None:
    hashes = save(open_store(), 0, 2)
    assert open_store(key=dataclasses.replace(KEY, model="renamed")).num_found(hashes) == 2


def test_the_longest_unused_segments_leave_when_the_folder_is_full(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(max_bytes=8 * 1024, segment_bytes=1024)
    first = save(store, 0, 11)  # a segment and a little more
    for start in range(11, 110, 11):
        save(store, start, start + 11)
        for path in files(tmp_path, ".index"):  # times of files are coarser than this test is fast
            age = path.stat().st_mtime
            os.utime(path, (age - 1, age - 1))
        assert store.load(first[:1]).result(10), "what is used stays"
    assert sum(path.stat().st_size for path in (tmp_path / "kv").glob("*/*.*")) <= 8 * 1024 + 1024
    stats = store.stats()
    assert 0 < stats.num_evicted_blocks == stats.num_saved_blocks - stats.num_stored_blocks
    assert store.num_found([block_hash(15)]) == 0


def test_a_segment_that_is_pruned_while_it_is_written_is_followed_by_another(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    save(store, 0, 2)
    assert len(prune(tmp_path / "kv", max_bytes=0)) == 1
    save(store, 2, 4)
    fresh = open_store()
    assert fresh.load([block_hash(2), block_hash(3)]).result(10) == [content(2), content(3)]
    assert fresh.num_found([block_hash(0)]) == 0


def test_a_full_disk_drops_blocks_and_says_so_once(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    save(store, 0, 1)
    real = os.write
    left = [BLOCK_BYTES + 60]

    def write(fd: int, data: memoryview | bytes) -> int:
        taken = data[: left[0]]
        left[0] -= len(taken)
        if not taken:
            raise OSError(28, "No space left on device")
        return real(fd, taken)

    monkeypatch.setattr(os, "write", write)
    save(store, 1, 4)
    save(store, 4, 6)
    monkeypatch.undo()
    assert store.stats().num_dropped_blocks == 4
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1
    save(store, 6, 7)  # there is room again
    fresh = open_store()
    assert [fresh.num_found([block_hash(i)]) for i in range(8)] == [1, 1, 0, 0, 0, 0, 1, 0]


def test_what_waits_for_the_disk_is_bounded(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from aioengine.kv_connector import file_store

    monkeypatch.setattr(file_store, "_MAX_WAITING_BYTES", 2 * BLOCK_BYTES)
    store = open_store()
    store.save([block_hash(i) for i in range(3)], memoryview(b"".join(map(content, range(3)))))
    assert store.stats().num_dropped_blocks == 3


def test_open_files_are_bounded(open_store: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from aioengine.kv_connector import file_store

    monkeypatch.setattr(file_store, "_MAX_OPEN_SEGMENTS", 3)
    store = open_store(segment_bytes=BLOCK_BYTES)
    hashes = save(store, 0, 20)
    before = len(os.listdir("/proc/self/fd"))
    assert store.load(hashes).result(10) == [content(i) for i in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_the_folder_is_for_its_owner_alone_and_keeps_its_seed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv")
    seed = read_seed(folder)
    assert read_seed(folder) == seed != read_seed(open_folder(tmp_path / "other"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "seed").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"kv_cache_dir .*file"):
        open_folder(tmp_path / "file")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "seed").write_text("short")
    with pytest.raises(ConfigError, match="5 characters instead of 64"):
        read_seed(tmp_path / "kv")
