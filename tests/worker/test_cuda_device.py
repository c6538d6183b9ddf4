"""What is asked of CUDA and in which order, against a `torch.cuda` that only takes notes: there may be no GPU here."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aioengine.attention.registry import select_attention_backend
from aioengine.config import EngineConfig
from aioengine.errors import ConfigError
from aioengine.resolved_config import GIB, CacheConfig, ModelInfo, ResolvedConfig, WorkerConfig
from aioengine.worker.device import CudaDevice, create_device
from aioengine.worker.memory_profile import Reservation
from aioengine.worker.pipeline.transfers import CudaTransfers
from aioengine.worker.worker import _attention_config

CUDA = torch.device("cuda", 0)


class FakeCuda:
    """Streams and events that log what is enqueued where; "compute" is the thread's stream."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current: list[Any] = []
        names = iter(["upload", "download", "compute"])
        numbers = itertools.count(1)
        fake = self

        class Stream:
            def __init__(self, device: torch.device | None = None) -> None:
                self.name = next(names)

            def wait_event(self, event: Event) -> None:
                fake.log.append(f"{self.name}: wait for event {event.number}")

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                self.number = next(numbers)
                self.blocking = blocking

            def record(self, stream: Stream) -> None:
                fake.log.append(f"{stream.name}: event {self.number}{' (blocking)' if self.blocking else ''}")

            def synchronize(self) -> None:
                fake.log.append(f"host: wait for event {self.number}")

        self.Stream, self.Event = Stream, Event

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def current_stream(self, device: torch.device | None = None) -> Any:
        return self.current[-1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    return fake


@pytest.fixture
def transfers(cuda: FakeCuda) -> CudaTransfers:
    transfers = CudaTransfers(CUDA)
    cuda.current.append(cuda.Stream())
    return transfers


def test_an_upload_runs_beside_the_computation_which_waits_for_it_on_the_device(cuda: FakeCuda, transfers: CudaTransfers) -> None:
    host, target = transfers.allocate_host(4).fill_(7), torch.zeros(4, dtype=torch.uint8)
    event = transfers.upload(host, target, after=transfers.mark())
    assert cuda.log == [
        "compute: event 1",
        "upload: wait for event 1",
        "upload: event 2",
        "compute: wait for event 2",
    ]
    assert target.tolist() == [7] * 4
    event.synchronize()
    assert cuda.log[-1] == "host: wait for event 2"


def test_a_download_follows_the_computation_and_only_its_reader_waits(cuda: FakeCuda, transfers: CudaTransfers) -> None:
    download = transfers.download([torch.arange(3), torch.ones(2, 2)])
    assert cuda.log == ["compute: event 1", "download: wait for event 1", "download: event 2 (blocking)"]
    first, second = download.wait()
    assert cuda.log[-1] == "host: wait for event 2"
    assert first.tolist() == [0, 1, 2]
    assert second.shape == (2, 2)


def test_a_graph_is_captured_after_a_run_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def graph(captured: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (pool, stream, capture_error_mode) == ("pool", "compute", "thread_local")
        log.append("begin")
        yield
        log.append("end")

    def forward() -> torch.Tensor:
        log.append("forward")
        return torch.ones(2)

    fakes = {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "Stream": lambda device: "compute",
        "set_stream": lambda stream: log.append(f"stream {stream}"),
        "synchronize": lambda device: log.append("synchronize"),
        "graph_pool_handle": lambda: "pool",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append("replay")),
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    device = CudaDevice()
    device.set_up_thread()
    captured = device.capture_graph(forward)
    captured.replay()
    assert log == ["stream compute", "forward", "synchronize", "begin", "forward", "end", "replay"]
    assert captured.output.tolist() == [1, 1]


def test_the_cache_gets_what_the_readings_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    fakes = {
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: log.append("reset"),
        "mem_get_info": lambda device: (120 * GIB, 140 * GIB),
        "memory_allocated": lambda device: 16 * GIB,
        "max_memory_allocated": lambda device: 18 * GIB,
        "memory_reserved": lambda device: 19 * GIB,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    cache = CacheConfig(block_size=16, gpu_memory_utilization=0.5)
    reserved = Reservation(tables=GIB, activation_share=0.5)
    left = CudaDevice().kv_cache_memory_bytes(cache, run_largest_step=lambda: log.append("run"), reserved=reserved)
    assert left == (70 - 18 - 1 - 1 - 1) * GIB
    assert log == ["run", "reset", "run"], "what is allocated once, in the first run, is not part of the peak"


def test_the_worker_need_not_wait_for_the_loop_longer_than_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own 5 ms between threads are several steps. What was set before is put back, if nobody else changed it."""
    for name in ("set_device", "Stream", "set_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    before = sys.getswitchinterval()
    device = CudaDevice(index=1)
    assert device.torch_device == torch.device("cuda", 1)
    try:
        device.set_up_thread()
        assert sys.getswitchinterval() <= 1e-3
        device.release_memory()
        assert sys.getswitchinterval() == before
        sys.setswitchinterval(1e-4)  # somebody wants less
        device.set_up_thread()
        device.release_memory()
        assert sys.getswitchinterval() == pytest.approx(1e-4)
    finally:
        sys.setswitchinterval(before)


def resolve(dtype: str = "float32", **options: Any) -> ResolvedConfig:
    info = ModelInfo("some model", "", "LlamaForCausalLM", 100, 64, 1, 2, 1, 16, dtype, frozenset())
    return EngineConfig(**options).resolve(info, cuda_available=True, free_memory_bytes=GIB)


def resolved(**options: Any) -> WorkerConfig:
    return resolve(**options).worker


def test_a_float32_checkpoint_runs_in_bfloat16_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Float32 takes twice the memory, and attention several times the time; whoever wants it says so."""
    config = resolved()
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cuda", "bfloat16", "bfloat16")
    assert [record.message for record in caplog.records] == [
        'some model is stored in float32 and runs in bfloat16 on CUDA; dtype="float32" keeps it'
    ]
    info = resolve().model
    caplog.clear()
    kept = EngineConfig(dtype="float32").resolve(info, cuda_available=True, free_memory_bytes=GIB)
    on_cpu = EngineConfig(device="cpu").resolve(info, cuda_available=True, free_memory_bytes=GIB)
    half = resolve("float16").worker
    assert (kept.worker.dtype, on_cpu.worker.dtype, half.dtype) == ("float32", "float32", "float16")
    assert not caplog.records


def test_one_of_several_gpus() -> None:
    assert (resolved(device="cuda:3").device, resolved(device="cuda:3").device_index) == ("cuda", 3)
    assert resolved(device="cuda").device_index is None
    for device in ("cuda:", "cuda:x", "cuda:-1", "gpu", "", "cuda:1000"):
        with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or one of several GPUs"):
            EngineConfig(device=device)


def test_a_share_of_the_memory_that_leaves_nothing_for_the_driver_is_refused() -> None:
    assert EngineConfig(gpu_memory_utilization=0.97).gpu_memory_utilization == 0.97
    for share in (1.0, 0.98, 0.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be in \(0, 0.97\]"):
            EngineConfig(gpu_memory_utilization=share)


def test_an_fp8_cache_is_for_gpus() -> None:
    attention = _attention_config(resolve("bfloat16", kv_cache_dtype="fp8"), torch.bfloat16)
    assert attention.kv_cache_dtype == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match=r"no KV cache of torch\.float8_e4m3fn"):
        select_attention_backend("torch_paged", attention, torch.device("cpu"))


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match='device="cuda:2" was asked for, but there are 2 CUDA devices'):
        create_device(WorkerConfig(device="cuda", dtype="float32", device_index=2))
    created = create_device(WorkerConfig(device="cuda", dtype="float32", device_index=1))
    assert created.torch_device == torch.device("cuda", 1)
