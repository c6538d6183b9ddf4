"""What differs between devices, in one small class each: threads, memory, copies. Chosen once, by `create_device`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioengine.config import CacheConfig, WorkerConfig
from aioengine.errors import ConfigError


class Device(ABC):
    """All methods are called from the worker's thread, `release_memory` also after that thread has ended."""

    torch_device: torch.device

    @abstractmethod
    def set_up_thread(self) -> None:
        """Prepare the calling thread for running the model."""

    @abstractmethod
    def kv_cache_memory_bytes(self, cache: CacheConfig) -> int:
        """How many bytes the KV cache may take now that the model is loaded."""

    @abstractmethod
    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor on the device. It may share memory with the array, which must not change any more."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The tensor's values on the host, waiting for the device if it is still computing them."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give memory that no tensor uses any more back to the system."""


class CpuDevice(Device):
    """Tensors share memory with the host's arrays, so copies cost nothing and there is nothing to wait for."""

    torch_device = torch.device("cpu")

    def __init__(self, *, num_threads: int | None) -> None:
        self._num_threads = num_threads

    def set_up_thread(self) -> None:
        # OpenMP keeps this number by thread: setting it elsewhere would not reach the worker's thread.
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)

    def kv_cache_memory_bytes(self, cache: CacheConfig) -> int:
        return cache.kv_cache_memory_bytes

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def to_host(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        return tensor.numpy()

    def release_memory(self) -> None:
        """The C allocator keeps what it likes; nothing to do."""


def create_device(config: WorkerConfig) -> Device:
    """The device that `config.device` names. Raises ConfigError if this version has no support for it."""
    if config.device != "cpu":
        raise ConfigError(f'device={config.device!r} is not supported by this version of aioengine; use device="cpu"')
    return CpuDevice(num_threads=config.num_threads)
