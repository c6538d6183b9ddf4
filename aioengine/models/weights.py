"""Which checkpoint tensor goes where: names, fused parts, and the check that nothing is missing or left over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.errors import ModelError
from aioengine.layers.linear import Linear
from aioengine.models.checkpoint_tensors import EMBEDDING, HEAD
from aioengine.models.config import DecoderConfig

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def check_sizes(config: DecoderConfig, tensors: Sequence[StoredTensor]) -> None:
    """Compare what config.json says with the tensors that are there, before anything is allocated.

    Whatever passes takes about as much memory as the files hold: a config.json of a few bytes cannot ask for more.
    Raises ModelError naming the first difference.
    """
    shapes = {stored.name: stored.shape for stored in tensors}
    num_found = len({match[1] for name in shapes if (match := _LAYER.match(name))})
    if num_found != config.num_layers:
        raise ModelError(f"config.json: num_hidden_layers is {config.num_layers}, the checkpoint has tensors of {num_found} layers")
    for name, shape in _matrix_shapes(config):
        stored = shapes.get(name)
        if stored is None:
            hint = "; a model whose head is its embedding says tie_word_embeddings: true" if name == HEAD else ""
            raise ModelError(f"the checkpoint lacks {name}{hint}")
        if stored != shape:
            raise ModelError(f"tensor {name} has shape {list(stored)}, config.json implies {list(shape)}")


def _matrix_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, size, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        yield HEAD, (config.vocab_size, hidden)
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        yield f"{attention}.q_proj.weight", (heads, hidden)
        yield f"{attention}.k_proj.weight", (kv_heads, hidden)
        yield f"{attention}.v_proj.weight", (kv_heads, hidden)
        yield f"{attention}.o_proj.weight", (hidden, heads)
        yield f"{mlp}.gate_proj.weight", (size, hidden)
        yield f"{mlp}.up_proj.weight", (size, hidden)
        yield f"{mlp}.down_proj.weight", (hidden, size)


class WeightAssigner:
    """Fills a model tensor by tensor.

    packed: fused module -> the checkpoint's names of its parts, in row order.
    """

    def __init__(self, model: nn.Module, packed: Mapping[str, tuple[str, ...]]) -> None:
        self._modules = dict(model.named_modules())
        self._parts = {part: (fused, index) for fused, parts in packed.items() for index, part in enumerate(parts)}
        self._packed = packed
        self._expected_names = frozenset(self._expected())
        self._missing = set(self._expected_names)

    def _expected(self) -> list[str]:
        """The checkpoint's names of all tensors this model needs. A tied head is one module and appears once."""
        names: list[str] = []
        for path, module in self._modules.items():
            parent, _, last = path.rpartition(".")
            if isinstance(module, Linear):
                sources = [f"{parent}.{part}" for part in self._packed[last]] if last in self._packed else [path]
                names += [
                    f"{source}.{kind}" for source in sources for kind in (("weight", "bias") if module.bias is not None else ("weight",))
                ]
            else:
                names += [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        return names

    def assign(self, stored: StoredTensor) -> None:
        """Read one tensor into its place. Raises ModelError if there is none, it is taken, or the shape differs."""
        if stored.name not in self._missing:
            what = "appears twice" if stored.name in self._expected_names else "is none of this architecture's"
            raise ModelError(f"tensor {stored.name} of the checkpoint {what}")
        path, _, kind = stored.name.rpartition(".")
        parent, _, last = path.rpartition(".")
        fused, index = self._parts.get(last, (last, 0))
        module = self._modules[f"{parent}.{fused}" if parent else fused]
        place = module.part(kind, index) if isinstance(module, Linear) else getattr(module, kind).data
        assert isinstance(place, torch.Tensor)  # the name is one of those expected
        if stored.shape != place.shape:
            raise ModelError(f"tensor {stored.name} has shape {list(stored.shape)}, config.json implies {list(place.shape)}")
        stored.read_into(place)
        self._missing.discard(stored.name)

    def check_complete(self) -> None:
        """Raise ModelError if a tensor never came."""
        if self._missing:
            first = sorted(self._missing)[:3]
            more = f" and {len(self._missing) - len(first)} more" if len(self._missing) > len(first) else ""
            raise ModelError(f"the checkpoint lacks {', '.join(first)}{more}")
