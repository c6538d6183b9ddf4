"""Finds and opens the native library and declares its C functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from aioengine_kernels.cpu.abi import (
    AttentionArgs,
    GatedMulArgs,
    Layer,
    LinearArgs,
    PeakArgs,
    RmsNormArgs,
    RopeCacheArgs,
    Step,
    layout_difference,
)

ABI_VERSION = 6
ISAS = ("portable", "avx2", "avx512")  # the index is the number in the C ABI
ISA_VARIABLE = "AIOENGINE_CPU_ISA"

_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "aio_abi_version": (_I, ()),
    "aio_supports": (_I, (_I,)),
    "aio_packed_bytes": (_L, (_I, _L, _L)),
    "aio_pack": (None, (_I, _P, _L, _L, _L, _L, _P, _I)),
    "aio_gather_rows": (None, (_I, _P, _L, _P, _L, _P, _L)),
    "aio_layout": (ctypes.c_char_p, (_L, ctypes.POINTER(ctypes.c_char_p), ctypes.POINTER(_L))),
    "aio_pin_thread": (_I, (_P, _L)),
    "aio_linear": (None, (ctypes.POINTER(LinearArgs),)),
    "aio_greedy": (_I, (ctypes.POINTER(LinearArgs), _P, ctypes.c_float, _P)),
    "aio_attention": (None, (ctypes.POINTER(AttentionArgs),)),
    "aio_rope_cache": (None, (ctypes.POINTER(RopeCacheArgs),)),
    "aio_rms_norm": (None, (ctypes.POINTER(RmsNormArgs),)),
    "aio_silu_mul": (None, (ctypes.POINTER(GatedMulArgs),)),
    "aio_gelu_mul": (None, (ctypes.POINTER(GatedMulArgs),)),
    "aio_peak": (ctypes.c_double, (ctypes.POINTER(PeakArgs),)),
    "aio_decoder": (_I, (ctypes.POINTER(Layer), _L, ctypes.POINTER(Step))),
}


@cache
def _open() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = Path(__file__).with_name("_native.so")  # a plain shared library: it is the same for every Python
    if not path.exists():
        return "the native CPU library was not built (no C++ compiler when aioengine was installed?): install g++ or clang++ and reinstall"
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"the native CPU library {path} cannot be loaded: {error}"
    version = library.aio_abi_version()
    if version != ABI_VERSION:
        return f"the native CPU library {path} has interface {version}, this code needs {ABI_VERSION}: reinstall aioengine"
    difference = layout_difference(library)
    if difference is not None:
        return f"the native CPU library {path} was built from other sources than this code ({difference}): reinstall aioengine"
    return library


def status() -> str | None:
    """None if the native kernels can be used, else the reason why not."""
    library = _open()
    return library if isinstance(library, str) else None


def open_library() -> ctypes.CDLL:
    """Raises RuntimeError with the text of `status()`."""
    library = _open()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def pin_thread(cores: Sequence[int]) -> None:
    """The calling thread, what it starts, and the native threads while they help it, run on these cores alone. Linux only.

    Raises OSError if it cannot be: there is no such core, or this process may not use it.
    """
    library = _open()
    if not isinstance(library, str):
        library.aio_pin_thread((ctypes.c_int32 * len(cores))(*cores), len(cores))
    os.sched_setaffinity(0, cores)  # without the library; and with it, it says what is wrong


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that this library has and this CPU runs, the best last."""
    library = open_library()
    return tuple(name for number, name in enumerate(ISAS) if library.aio_supports(number))


def choose_isa(isa: str | None = None) -> str:
    """`isa`, else the environment variable AIOENGINE_CPU_ISA, else the best that this CPU runs. Raises ValueError for others."""
    supported = supported_isas()
    wanted = isa or os.environ.get(ISA_VARIABLE) or supported[-1]
    if wanted not in supported:
        raise ValueError(f"instruction set {wanted!r} is not available here; this CPU runs: {', '.join(supported)}")
    return wanted
