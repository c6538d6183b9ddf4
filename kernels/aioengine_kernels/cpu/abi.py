"""The structures of the C ABI, field by field as in src/common.h; the library's own account of sizes and offsets is held against them."""

from __future__ import annotations

import ctypes

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class CacheLayout(ctypes.Structure):
    _fields_ = (("kv_type", _I), ("block_size", _I), ("num_kv_heads", _I), ("head_dim", _I), ("data", _P))


class LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, _I) for name in ("isa", "fast", "format", "num_threads")),
        *((name, _L) for name in ("m", "n", "k")),
        *(("weights", _P), ("x", _P), ("ldx", _L), ("y", _P), ("ldy", _L), ("bias", _P)),
    )


class AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("cache", CacheLayout),
        *((name, _I) for name in ("isa", "num_heads", "num_threads")),
        *(("query", _P), ("query_stride", _L), ("out", _P), ("out_stride", _L)),
        *(("block_table", _P), ("block_table_stride", _L), ("seq_lens", _P), ("query_start_loc", _P)),
        *(("num_reqs", _L), ("window", _L), ("scale", _F), ("soft_cap", _F)),
    )


class RopeCacheArgs(ctypes.Structure):
    _fields_ = (
        ("cache", CacheLayout),
        *((name, _I) for name in ("isa", "num_heads", "num_threads")),
        ("num_tokens", _L),
        *(("query", _P), ("query_stride", _L), ("key", _P), ("key_stride", _L), ("value", _P), ("value_stride", _L)),
        *((name, _P) for name in ("cos_sin", "positions", "slots", "query_norm", "key_norm")),
        ("norm_eps", _F),
    )


class RmsNormArgs(ctypes.Structure):
    _fields_ = (
        *(("isa", _I), ("num_threads", _I), ("m", _L), ("n", _L)),
        *(("x", _P), ("ldx", _L), ("residual", _P), ("ldr", _L), ("weight", _P), ("y", _P), ("ldy", _L), ("eps", _F)),
    )


class GatedMulArgs(ctypes.Structure):
    _fields_ = (
        *(("isa", _I), ("num_threads", _I), ("m", _L), ("n", _L)),
        *(("gate_up", _P), ("ldx", _L), ("y", _P), ("ldy", _L)),
    )


class Matrix(ctypes.Structure):
    _fields_ = (("weights", _P), ("bias", _P), ("n", _L), ("k", _L), ("format", _I), ("fast", _I), ("next", _P))


class LowRank(ctypes.Structure):
    _fields_ = (("down", Matrix), ("up", _P))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _P) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, _P) for name in ("attention_out_norm", "mlp_out_norm", "cos_sin", "cache")),
        ("group", _L),
    )


class CacheGroup(ctypes.Structure):
    _fields_ = (("slots", _P), ("block_table", _P), ("block_table_stride", _L), ("window", _L))


class Step(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in ("residual", "normed", "final_norm", "positions")),
        *((name, _P) for name in ("seq_lens", "query_start_loc", "groups")),
        *((name, _L) for name in ("num_groups", "num_reqs", "m", "hidden")),
        *((name, _F) for name in ("eps", "scale", "soft_cap")),
        *((name, _I) for name in ("isa", "num_threads", "kv_type", "block_size", "num_heads", "num_kv_heads", "head_dim", "activation")),
        ("all_reduce", _P),
        ("adapters", _P),
    )


AllReduce = ctypes.CFUNCTYPE(_I, _P, _L)  # (numbers, how many) -> 0, or not 0: the step ends there


class PeakArgs(ctypes.Structure):
    _fields_ = (("isa", _I), ("kind", _I), ("num_threads", _I), ("repeats", _L), ("data", _P), ("bytes", _L))


STRUCTURES = (
    CacheLayout,
    LinearArgs,
    AttentionArgs,
    RopeCacheArgs,
    RmsNormArgs,
    GatedMulArgs,
    Matrix,
    LowRank,
    Layer,
    CacheGroup,
    Step,
    PeakArgs,
)


def declared_layout() -> dict[str, int]:
    """ "Structure.field" -> its offset, and "Structure." -> the size, as declared here."""
    layout: dict[str, int] = {}
    for structure in STRUCTURES:
        layout[f"{structure.__name__}."] = ctypes.sizeof(structure)
        layout |= {f"{structure.__name__}.{name}": getattr(structure, name).offset for name, *_ in structure._fields_}
    return layout


def library_layout(library: ctypes.CDLL) -> dict[str, int]:
    """The same as the library was compiled."""
    layout: dict[str, int] = {}
    field, offset = ctypes.c_char_p(), ctypes.c_int64()
    while (structure := library.aio_layout(len(layout), ctypes.byref(field), ctypes.byref(offset))) is not None:
        layout[f"{structure.decode()}.{(field.value or b'').decode()}"] = offset.value
    return layout


def layout_difference(library: ctypes.CDLL) -> str | None:
    """None if both sides mean the same, else the first field that they do not agree on."""
    ours, theirs = declared_layout(), library_layout(library)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return f"{name} is at {theirs.get(name)} in the library and at {ours.get(name)} here"
    return None
