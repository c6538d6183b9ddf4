"""Gated activations: f(gate) * up, on the output of one fused gate_up product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F

from aioengine.layers.triton_ops import find_triton_op

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation (Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415)."""
    return F.gelu(x, approximate="tanh")


def known_activations() -> dict[str, Activation]:
    """By the names that `hidden_act` of a config gives them."""
    return {
        "silu": F.silu,
        "swish": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": gelu_tanh,
        "gelu_new": gelu_tanh,
        "relu": F.relu,
    }


def find_activation(name: str) -> Activation | None:
    """The activation that `hidden_act` of a config names; None if it is not one of those known here."""
    return known_activations().get(name)


def gated(activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2 * size], the gate first -> activation(gate) * up [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


_TRITON_OPS: Mapping[Activation, str] = MappingProxyType({F.silu: "activation:silu_mul", gelu_tanh: "activation:gelu_mul"})


def gated_op(activation: Activation, device: torch.device) -> Activation:
    """`gated` with that activation, as one kernel where there is one. It takes gate_up [n, 2 * size] -> [n, size]."""
    name = _TRITON_OPS.get(activation)
    op = None if name is None else find_triton_op(name, device)
    return partial(gated, activation) if op is None else op
