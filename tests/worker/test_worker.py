from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine.attention.triton_paged import TritonPagedBackend
from aioengine.checkpoint.files import ModelFiles
from aioengine.errors import ConfigError
from aioengine.models import loader
from aioengine.resolved_config import CacheConfig, ResolvedConfig
from aioengine.worker.memory_profile import Reservation
from aioengine.worker.worker import Worker
from aioengine_kernels.cpu import library

MakeConfig = Callable[..., ResolvedConfig]
FILES = ModelFiles(name="tiny", folder=Path("nowhere"), weights=(), format="gguf")
# The tiny model: 2 layers x keys and values x 4 tokens x 2 heads x 8 x 4 bytes.
BYTES_PER_BLOCK = 2 * 2 * 4 * 2 * 8 * 4


class LoadedModel:
    num_layers = 2
    runs_own_threads = False


@pytest.fixture
def make_worker(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    calls: list[dict[str, Any]] = []

    def load_model(files: ModelFiles, **options: Any) -> LoadedModel:
        calls.append({"files": files, **options})
        return LoadedModel()

    monkeypatch.setattr(loader, "load_model", load_model)

    def make(**options: Any) -> Worker:
        worker = Worker(make_config(num_threads=torch.get_num_threads(), **options), files=FILES)
        worker.load_model()
        assert calls[-1]["files"] is FILES
        assert calls[-1]["dtype"] == torch.float32
        assert calls[-1]["info"].name == "tiny"
        return worker

    return make


def test_blocks_as_configured(make_worker: Callable[..., Worker]) -> None:
    assert make_worker(num_kv_cache_blocks=5).determine_num_kv_cache_blocks() == 5


def test_blocks_from_memory(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(kv_cache_memory_bytes=20 * BYTES_PER_BLOCK + 1)
    assert worker.determine_num_kv_cache_blocks() == 20


def test_never_more_blocks_than_all_requests_could_use(make_worker: Callable[..., Worker]) -> None:
    assert make_worker(kv_cache_memory_bytes=1 << 30).determine_num_kv_cache_blocks() == 3 * 64 // 4 + 1
    assert make_worker(kv_cache_memory_bytes=1 << 30, max_model_len=13).determine_num_kv_cache_blocks() == 3 * 4 + 1


@pytest.mark.parametrize(("num_bytes", "fits"), [(17 * BYTES_PER_BLOCK, True), (17 * BYTES_PER_BLOCK - 1, False), (1, False)])
def test_room_for_one_longest_request_or_an_error(make_worker: Callable[..., Worker], num_bytes: int, fits: bool) -> None:
    worker = make_worker(kv_cache_memory_bytes=num_bytes, max_model_len=64)
    if fits:
        assert worker.determine_num_kv_cache_blocks() == 17
        return
    tokens = 15 * 4 if num_bytes > 1 else 0
    with pytest.raises(ConfigError, match=rf"max_model_len \(64\) tokens takes .* GiB, .* hold {tokens} tokens; lower max_model_len"):
        worker.determine_num_kv_cache_blocks()


@pytest.mark.parametrize("left_open", ["auto", None])
def test_a_length_left_open_is_what_the_memory_holds_and_the_log_says_so(
    make_worker: Callable[..., Worker], left_open: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(kv_cache_memory_bytes=16 * BYTES_PER_BLOCK, max_model_len=left_open)
    assert worker.config.scheduler.max_model_len == 64
    num_blocks = worker.determine_num_kv_cache_blocks()
    worker.initialize_kv_cache(num_blocks)
    assert num_blocks == 16
    assert worker.config.scheduler.max_model_len == 60
    assert worker.config == make_worker(kv_cache_memory_bytes=16 * BYTES_PER_BLOCK).config.fitted(16)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("max_model_len is 60 tokens")
    assert "the 64 of tiny" in line
    assert "raise kv_cache_memory_bytes" in line


def test_a_length_left_open_stays_the_models_where_it_fits(make_worker: Callable[..., Worker], caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker(kv_cache_memory_bytes=17 * BYTES_PER_BLOCK)
    worker.initialize_kv_cache(worker.determine_num_kv_cache_blocks())
    assert worker.config.scheduler.max_model_len == 64
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_not_even_one_block_is_an_error_also_where_the_length_is_open(make_worker: Callable[..., Worker]) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len \(64\) tokens takes .*hold 0 tokens"):
        make_worker(kv_cache_memory_bytes=1).determine_num_kv_cache_blocks()


def test_the_cache_is_allocated_for_every_layer_and_freed(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    with pytest.raises(RuntimeError, match="no KV cache yet"):
        worker.sample_tokens()
    worker.initialize_kv_cache(9)
    shapes = [tuple(kv_cache.shape) for kv_cache in worker.runner._kv_caches]
    assert shapes == [(2, 9, 4, 2, 8)] * 2
    worker.shutdown()
    with pytest.raises(RuntimeError, match="no KV cache yet"):
        worker.sample_tokens()


def test_an_unknown_backend_is_refused_before_anything_is_loaded(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="unknown attention_backend 'nope'"):
        Worker(make_config(attention_backend="nope"), files=FILES)


def test_a_wrong_instruction_set_is_refused_before_anything_is_loaded(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "status", lambda: None)
    monkeypatch.setattr(library, "supported_isas", lambda: ("portable", "avx2"))
    monkeypatch.setenv("AIOENGINE_CPU_ISA", "avx1024")
    message = "AIOENGINE_CPU_ISA is wrong: instruction set 'avx1024' is not available here; this CPU runs: portable, avx2"
    with pytest.raises(ConfigError, match=message):
        Worker(make_config(), files=FILES)


def test_threads_are_set_in_the_calling_thread(make_config: MakeConfig) -> None:
    before = torch.get_num_threads()
    try:
        Worker(make_config(num_threads=1), files=FILES)
        assert torch.get_num_threads() == 1
        config = make_config()
        Worker(replace(config, worker=replace(config.worker, num_threads=None)), files=FILES)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_device_with_graphs_is_warmed_up_and_captured_once_the_cache_is_there(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, graphs_on_cpu: Any, tiny_model_class: Any, enforce_eager: bool
) -> None:
    class Gpu(graphs_on_cpu):  # type: ignore[misc]
        compiles_kernels = True

        def kv_cache_memory_bytes(self, cache: CacheConfig, *, run_largest_step: Callable[[], None], reserved: Reservation) -> int:
            run_largest_step()
            num_forwards.append(model.num_forwards)
            assert reserved.tables > 0
            assert (reserved.graphs > 0) != enforce_eager
            return 20 * BYTES_PER_BLOCK

    num_forwards: list[int] = []
    # It would refuse a CPU; here its kernels are their references.
    monkeypatch.setattr(TritonPagedBackend, "supports", classmethod(lambda cls, config, device: None))
    monkeypatch.setattr("aioengine.worker.worker.create_device", lambda config: Gpu(num_threads=None))
    monkeypatch.setattr(loader, "load_model", lambda files, *, attention_backend, **_: tiny_model_class(attention_backend))
    worker = Worker(make_config(attention_backend="triton", enforce_eager=enforce_eager), files=FILES)
    worker.load_model()
    model: Any = worker._model
    assert worker.determine_num_kv_cache_blocks() == 20
    assert num_forwards == [1]
    worker.initialize_kv_cache(20)
    assert worker.runner.num_graphs == (0 if enforce_eager else 3)  # 1, 2 and max_num_seqs
    assert model.num_forwards == 1 + 2 + worker.runner.num_graphs
    assert worker.runner.states.num_requests == 0
