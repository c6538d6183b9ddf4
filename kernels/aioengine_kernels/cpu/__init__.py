"""The native CPU kernels: matrix products on packed (quantized) weights, paged attention, and the small operations of a layer.

`status()` says why they are unavailable (None: they are there); `load_kernels()` gives the object that holds the operations.
See README.md in this folder for layouts and measurements. Importing this package imports neither torch nor the library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioengine_kernels.cpu.decoder import AdaptedRows, DecoderShape, GroupInputs, LayerWeights, NativeDecoder
    from aioengine_kernels.cpu.greedy import GreedyHead
    from aioengine_kernels.cpu.kernels import CpuKernels, KvCacheFormat, load_kernels
    from aioengine_kernels.cpu.library import ISAS, pin_thread, status, supported_isas
    from aioengine_kernels.cpu.low_rank import PackedAdapter
    from aioengine_kernels.cpu.packing import FusedMatrix, PackedMatrix

_HOMES = {
    "AdaptedRows": "decoder",
    "CpuKernels": "kernels",
    "KvCacheFormat": "kernels",
    "DecoderShape": "decoder",
    "FusedMatrix": "packing",
    "GreedyHead": "greedy",
    "GroupInputs": "decoder",
    "ISAS": "library",
    "LayerWeights": "decoder",
    "NativeDecoder": "decoder",
    "PackedAdapter": "low_rank",
    "PackedMatrix": "packing",
    "load_kernels": "kernels",
    "pin_thread": "library",
    "status": "library",
    "supported_isas": "library",
}

__all__ = [
    "ISAS",
    "AdaptedRows",
    "CpuKernels",
    "DecoderShape",
    "FusedMatrix",
    "GreedyHead",
    "GroupInputs",
    "KvCacheFormat",
    "LayerWeights",
    "NativeDecoder",
    "PackedAdapter",
    "PackedMatrix",
    "load_kernels",
    "pin_thread",
    "status",
    "supported_isas",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
