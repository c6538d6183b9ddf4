"""What differs between devices, in one small class each: threads, memory, copies, graphs. Chosen once, by `create_device`."""

from __future__ import annotations

import gc
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.checks.cores import format_cores
from aioengine.errors import ConfigError
from aioengine.resolved_config import CacheConfig, WorkerConfig
from aioengine.worker.pipeline.transfers import CudaTransfers, HostTransfers, Transfers
from aioengine_kernels.cpu import pin_thread

if TYPE_CHECKING:
    from aioengine.worker.cuda_graphs import CapturedGraph
    from aioengine.worker.memory_profile import Reservation


_SWITCH_INTERVAL_S = 5e-4
"""How long Python lets one thread run while another waits: 5 ms by default, which is several steps of a GPU. The loop's thread
schedules in a few tenths of a millisecond, and the worker's must not wait longer than that to enqueue the next step."""


class Device(ABC):
    """All methods are called from the worker's thread, `release_memory` also after that thread has ended."""

    torch_device: torch.device
    supports_graphs: bool = False  # `capture_graph` works
    compiles_kernels: bool = False  # the first launch of a kernel takes a second or more
    kv_cache_memory_setting: str  # the setting that gives the KV cache more memory

    @abstractmethod
    def set_up_thread(self) -> None:
        """Prepare the calling thread for running the model."""

    @abstractmethod
    def kv_cache_memory_bytes(self, cache: CacheConfig, *, run_largest_step: Callable[[], None], reserved: Reservation) -> int:
        """How many bytes the KV cache may take now that the model is loaded.

        run_largest_step: a step that takes as much memory beside the weights as any will.
        reserved: what will be allocated behind it, for tables and graphs.
        """

    @abstractmethod
    def create_transfers(self) -> Transfers | None:
        """How arrays come and go while the device runs behind the host; None where it works on the host's own arrays."""

    @abstractmethod
    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor on the device. It may share memory with the array, which must not change any more."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The tensor's values on the host, waiting for the device if it is still computing them."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give memory that no tensor uses any more back to the system."""

    def capture_graph(self, forward: Callable[[], torch.Tensor]) -> CapturedGraph:
        """Record what `forward` launches, for running it again on the same buffers. Only if `supports_graphs`."""
        raise NotImplementedError(f"{self.torch_device} has no graphs")


def limit_torch_threads(num_threads: int) -> None:
    """Let this thread's PyTorch operations use `num_threads` threads, and change nothing for any other thread.

    OpenMP keeps the number by thread, but PyTorch also notes it for every thread that starts later: another engine's
    worker, or the program around this one. A thread that does nothing else puts that note back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


def pin_threads(cores: tuple[int, ...] | None) -> None:
    """Keep this thread, those that it starts and those that help it on `cores`; None: leave them. Raises ConfigError."""
    if cores is None:
        return
    try:
        pin_thread(cores)
    except OSError as exc:  # the cores were there when the settings were read
        raise ConfigError(f"cpu_affinity ({format_cores(cores)}) cannot be had: {exc}") from exc


class CpuDevice(Device):
    """Tensors share memory with the host's arrays, so copies cost nothing and there is nothing to wait for."""

    torch_device = torch.device("cpu")
    kv_cache_memory_setting = "kv_cache_memory_bytes"

    def __init__(self, *, num_threads: int | None, cpu_affinity: tuple[int, ...] | None = None) -> None:
        self._num_threads = num_threads
        self._cpu_affinity = cpu_affinity

    def set_up_thread(self) -> None:
        pin_threads(self._cpu_affinity)
        # OpenMP keeps this number by thread: setting it elsewhere would not reach the worker's thread.
        if self._num_threads is not None:
            limit_torch_threads(self._num_threads)

    def kv_cache_memory_bytes(self, cache: CacheConfig, *, run_largest_step: Callable[[], None], reserved: Reservation) -> int:
        return cache.kv_cache_memory_bytes

    def create_transfers(self) -> Transfers | None:
        return None

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        return tensor.numpy()

    def release_memory(self) -> None:
        """The C allocator keeps what it likes; nothing to do."""


class InterpreterDevice(CpuDevice):
    """A CPU that runs steps as a GPU does, for Triton's interpreter: the same tables, kernels and order of calls."""

    def create_transfers(self) -> Transfers:
        return HostTransfers()


class CudaDevice(Device):
    """One GPU. Computation runs on a stream of its own, copies on two others (see `CudaTransfers`)."""

    supports_graphs = True
    compiles_kernels = True
    kv_cache_memory_setting = "gpu_memory_utilization"

    def __init__(self, *, num_threads: int | None = None, index: int | None = None, cpu_affinity: tuple[int, ...] | None = None) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._switch_interval: float | None = None  # of before, if this device has changed it
        self._num_threads = num_threads
        self._cpu_affinity = cpu_affinity
        self._stream: torch.cuda.Stream | None = None
        self._graph_pool: Any = None  # shared by all graphs: they never run at the same time

    def set_up_thread(self) -> None:
        pin_threads(self._cpu_affinity)
        if self._num_threads is not None:
            limit_torch_threads(self._num_threads)
        if sys.getswitchinterval() > _SWITCH_INTERVAL_S:
            self._switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        torch.cuda.set_device(self.torch_device)
        # Not the default stream: that one cannot be captured, and others wait for it implicitly.
        self._stream = torch.cuda.Stream(self.torch_device)
        torch.cuda.set_stream(self._stream)

    def kv_cache_memory_bytes(self, cache: CacheConfig, *, run_largest_step: Callable[[], None], reserved: Reservation) -> int:
        from aioengine.worker.memory_profile import MemoryProfile, kv_cache_bytes

        device = self.torch_device
        run_largest_step()  # compiles kernels and lets libraries allocate: none of that belongs to the peak
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_largest_step()
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        profile = MemoryProfile(
            total=total,
            free=free,
            allocator_before=before,
            allocator_peak=torch.cuda.max_memory_allocated(device),
            allocator_reserved=torch.cuda.memory_reserved(device),
        )
        torch.cuda.empty_cache()
        return kv_cache_bytes(profile, utilization=cache.gpu_memory_utilization, reserved=reserved)

    def create_transfers(self) -> Transfers:
        return CudaTransfers(self.torch_device)

    def capture_graph(self, forward: Callable[[], torch.Tensor]) -> CapturedGraph:
        from aioengine.worker.cuda_graphs import CapturedGraph

        forward()  # compiles kernels and lets libraries allocate, neither of which can be captured
        torch.cuda.synchronize(self.torch_device)
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the GPU meanwhile: only this thread's calls are captured and checked.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream, capture_error_mode="thread_local"):
            output = forward()
        return CapturedGraph(graph.replay, output)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.torch_device)

    def to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        return tensor.cpu().numpy()

    def release_memory(self) -> None:
        # Put back what was before, unless somebody else has changed it since. Python keeps it in whole microseconds.
        if self._switch_interval is not None and abs(sys.getswitchinterval() - _SWITCH_INTERVAL_S) < 1e-6:
            sys.setswitchinterval(self._switch_interval)
            self._switch_interval = None
        gc.collect()  # a model is full of reference cycles
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()


def create_device(config: WorkerConfig) -> Device:
    """The device that `config.device` names; with TRITON_INTERPRET=1 a CPU that runs the steps of a GPU.

    Raises ConfigError if there is none.
    """
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(f'device="cuda" was asked for, but PyTorch {torch.__version__} finds no CUDA device')
        if config.device_index is not None and config.device_index >= torch.cuda.device_count():
            raise ConfigError(f'device="cuda:{config.device_index}" was asked for, but there are {torch.cuda.device_count()} CUDA devices')
        return CudaDevice(num_threads=config.num_threads, index=config.device_index, cpu_affinity=config.cpu_affinity)
    if os.environ.get("TRITON_INTERPRET") == "1" and config.attention_backend in ("auto", "triton"):
        return InterpreterDevice(num_threads=config.num_threads, cpu_affinity=config.cpu_affinity)
    return CpuDevice(num_threads=config.num_threads, cpu_affinity=config.cpu_affinity)
