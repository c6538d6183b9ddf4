"""Which layers run as one fused kernel: chosen once, when a layer is built, by the device of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch

TensorOp = Callable[..., torch.Tensor]


def find_triton_op(name: str, device: torch.device) -> TensorOp | None:
    """The op "module:function" of `aioengine_kernels` if Triton runs on `device`, else None: the layer then stays with torch.

    Triton runs on CUDA devices, and on a CPU in a process that set TRITON_INTERPRET=1. It is not imported in vain: that
    takes most of a second.
    """
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (device.type == "cuda" or is_interpreted) or find_spec("triton") is None:
        return None
    module, _, function = name.partition(":")
    op: TensorOp = getattr(import_module(f"aioengine_kernels.{module}"), function)
    return op
