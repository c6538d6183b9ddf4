"""Products on the native CPU kernels inside transformers' code: linear layers and experts whose weights stay packed.

For mixtures of experts, of which a token meets a few: what counts is how many bytes of weights it passes by, and in a GGUF file
they are a seventh of float32's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aioengine.checkpoint.gguf_experts import EXPERT_FAMILIES, ExpertFamily
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.models.native_decoder import pack_alike, packable_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aioengine_kernels.cpu import CpuKernels, FusedMatrix, PackedMatrix

_HEAD = "lm_head"


def find_family(model_type: object) -> ExpertFamily | None:
    """The mixture of experts whose tensors are known by name here; only these are packed."""
    return next((family for family in EXPERT_FAMILIES.values() if family.model_type == model_type), None)


class Products:
    """How the packed layers of one model compute. fast: activations meet the weights in 8 bits."""

    def __init__(self, kernels: CpuKernels, *, fast: bool) -> None:
        self.kernels = kernels
        self.fast = fast


class PackedLinear(nn.Module):
    """In the place of an `nn.Linear`. Its bias is a parameter as before; the weight comes with `fill`."""

    def __init__(self, replaced: nn.Linear, products: Products, *, always_exact: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = replaced.in_features, replaced.out_features, replaced.bias
        self._products = products
        self._always_exact = always_exact
        self._matrix: PackedMatrix | None = None

    def fill(self, stored: StoredTensor) -> None:
        self._matrix = pack_alike([stored])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        assert self._matrix is not None, "fill() comes first"
        fast = self._products.fast and not self._always_exact
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._products.kernels.linear(rows, self._matrix, self.bias, fast=fast).view(*x.shape[:-1], self.out_features)


class PackedExperts(nn.Module):
    """In the place of transformers' experts of a layer: gated, without biases. The rows of an expert are multiplied together."""

    def __init__(self, replaced: Any, products: Products) -> None:
        super().__init__()
        self.num_experts: int = replaced.num_experts
        self._activation: Callable[[torch.Tensor], torch.Tensor] = replaced.act_fn
        self._products = products
        self._gate_up: list[PackedMatrix | FusedMatrix] = []
        self._down: list[PackedMatrix | FusedMatrix] = []

    @property
    def num_filled(self) -> int:
        return len(self._down)

    def fill(self, gate: StoredTensor, up: StoredTensor, down: StoredTensor) -> None:
        """The next expert."""
        self._gate_up.append(_fuse([gate, up]))
        self._down.append(_fuse([down]))

    def forward(
        self,
        hidden: torch.Tensor,  # [n, hidden_size]
        top_k_index: torch.Tensor,  # [n, k] int64
        top_k_weights: torch.Tensor,  # [n, k]
    ) -> torch.Tensor:  # [n, hidden_size]
        k = top_k_index.shape[1]
        order = top_k_index.flatten().argsort(stable=True)  # of the n * k products, by expert
        rows = hidden[order // k]
        counts = torch.bincount(top_k_index.flatten(), minlength=self.num_experts).tolist()
        out, first, linear, fast = torch.empty_like(rows), 0, self._products.kernels.linear, self._products.fast
        for expert, count in enumerate(counts):
            if count:
                end = first + count
                gate, up = linear(rows[first:end], self._gate_up[expert], fast=fast).chunk(2, dim=-1)
                out[first:end] = linear((self._activation(gate) * up).contiguous(), self._down[expert], fast=fast)
                first = end
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (out[back].view(*top_k_index.shape, -1) * top_k_weights[..., None]).sum(dim=1)


class Packing:
    """Which modules of a model take which tensors, packed. Everything else is transformers' to load."""

    def __init__(self, family: ExpertFamily, tensors: Sequence[StoredTensor], products: Products) -> None:
        self._family = family
        self._tensors = {stored.name: stored for stored in tensors}
        self._products = products
        self._linears: dict[str, PackedLinear] = {}  # by the name of the weight
        self._experts: dict[tuple[str, str, str], tuple[PackedExperts, int]] = {}  # by the names of an expert's weights

    def class_of(self, model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """The model, built with packed layers in their places."""

        def build(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            model_class.__init__(model, config, *args, **kwargs)
            self._replace(model, tied=bool(config.tie_word_embeddings))

        # transformers looks into the module of a class to see what its code can do.
        return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})

    def _replace(self, model: nn.Module, *, tied: bool) -> None:
        self._linears.clear()
        self._experts.clear()
        for path, module in list(model.named_modules()):
            if type(module) is nn.Linear and not (path == _HEAD and tied):
                stored = self._tensors.get(f"{path}.weight")
                if stored is not None and stored.shape == (module.out_features, module.in_features):
                    linear = PackedLinear(module, self._products, always_exact=path == _HEAD)
                    model.set_submodule(path, linear)
                    self._linears[f"{path}.weight"] = linear
            elif path.endswith(".experts") and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
                self._replace_experts(model, path, module)

    def _replace_experts(self, model: nn.Module, path: str, module: Any) -> None:
        layer = path.split(".")[2]
        names = [self._names(layer, expert) for expert in range(module.num_experts)]
        gated, down = tuple(module.gate_up_proj.shape[1:]), tuple(module.down_proj.shape[1:])
        half = (gated[0] // 2, gated[1])
        if not all(self._shapes(of_expert) == (half, half, down) for of_expert in names):
            return  # transformers' loader says what is wrong, or knows the names better
        packed = PackedExperts(module, self._products)
        model.set_submodule(path, packed)
        self._experts.update((of_expert, (packed, expert)) for expert, of_expert in enumerate(names))

    def _names(self, layer: str, expert: int) -> tuple[str, str, str]:
        parts = (self._family.names[part].format(expert) for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"))
        gate, up, down = (f"model.layers.{layer}.{part}.weight" for part in parts)
        return gate, up, down

    def _shapes(self, names: Sequence[str]) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(self._tensors[name].shape if name in self._tensors else None for name in names)

    def unpacked(self) -> list[StoredTensor]:
        """What is left to transformers, once `class_of` has built the model."""
        taken = {*self._linears, *(name for names in self._experts for name in names)}
        return [stored for name, stored in self._tensors.items() if name not in taken]

    def fill(self) -> None:
        """Read the packed weights into their places. Raises ModelError for tensors that cannot be read."""
        for name, linear in self._linears.items():
            linear.fill(self._tensors[name])
        for (gate, up, down), (experts, number) in self._experts.items():
            assert number == experts.num_filled, f"{gate} is not the next expert"
            experts.fill(self._tensors[gate], self._tensors[up], self._tensors[down])


def _fuse(parts: Sequence[StoredTensor]) -> PackedMatrix | FusedMatrix:
    """The parts' rows as one matrix; those that are stored alike are packed together."""
    from aioengine_kernels.cpu import FusedMatrix

    packed = tuple(pack_alike(list(alike)) for _, alike in groupby(parts, key=packable_kind))
    return packed[0] if len(packed) == 1 else FusedMatrix(packed)


def why_not_packed(raw: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the model's products can run on the native kernels, else the reason."""
    from aioengine_kernels.cpu import status

    if find_family(raw.get("model_type")) is None:
        return "only mixtures of experts (Mixtral, Qwen3-MoE) have packed weights on transformers' code"
    if device.type != "cpu" or dtype != torch.float32:
        return f"packed weights are multiplied in float32 on the CPU, not in {dtype} on {device.type}"
    return status()
