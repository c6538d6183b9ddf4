"""Copies between the host and a device, and the events that say when they are done.

The order of a step: `upload` may run beside the computation of the step before; the computation waits for it on the
device. `download` starts when the computation enqueued so far is done, beside whatever is enqueued next. The host waits
for an event in `Event.synchronize` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch


class Event(Protocol):
    def synchronize(self) -> None:
        """Wait, without holding the GIL, until what was enqueued before the event is done."""


class Download:
    """Copies that are on their way to the host. `wait` may be called from any thread."""

    def __init__(self, host: Sequence[torch.Tensor], event: Event, *, sources: Sequence[torch.Tensor] = ()) -> None:
        self._host = host
        self._event = event
        self._sources = sources  # their memory must not be given to others before the copies are done

    def wait(self) -> list[npt.NDArray[Any]]:
        """The values, in the order of the tensors that were asked for."""
        self._event.synchronize()
        self._sources = ()
        return [tensor.numpy() for tensor in self._host]


class Transfers(ABC):
    """All methods but `Download.wait` are called in the worker's thread."""

    torch_device: torch.device

    @abstractmethod
    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of host memory that the device can copy from by itself."""

    @abstractmethod
    def mark(self) -> Event:
        """An event after all computation that has been enqueued so far."""

    @abstractmethod
    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event) -> Event:
        """Copy `host` to `device` once `after` has passed. What is enqueued next sees the copy; the event follows it."""

    @abstractmethod
    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        """Copy the tensors to the host once the computation enqueued so far is done."""


class _Done:
    """The event of something that has happened already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostTransfers(Transfers):
    """For a "device" whose memory is the host's: copies happen at once."""

    torch_device = torch.device("cpu")

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Event:
        return _Done()

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event) -> Event:
        after.synchronize()
        device.copy_(host)
        return _Done()

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        return Download([tensor.clone() for tensor in tensors], _Done())


class CudaTransfers(Transfers):
    """Two streams beside the computation's, which is the calling thread's current stream."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._upload_stream = torch.cuda.Stream(torch_device)
        self._download_stream = torch.cuda.Stream(torch_device)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def upload(self, host: torch.Tensor, device: torch.Tensor, *, after: Event) -> Event:
        assert isinstance(after, torch.cuda.Event)
        compute_stream = torch.cuda.current_stream(self.torch_device)
        event = torch.cuda.Event()
        with torch.cuda.stream(self._upload_stream):
            self._upload_stream.wait_event(after)
            device.copy_(host, non_blocking=True)
            event.record(self._upload_stream)
        compute_stream.wait_event(event)
        return event

    def download(self, tensors: Sequence[torch.Tensor]) -> Download:
        computed = self.mark()
        # A blocking event lets the waiting thread sleep; the default one spins on a core that the loop could use.
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._download_stream):
            self._download_stream.wait_event(computed)
            host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for target, source in zip(host, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            event.record(self._download_stream)
        return Download(host, event, sources=tuple(tensors))
