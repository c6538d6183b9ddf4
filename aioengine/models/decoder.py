"""The decoder that Llama, Mistral, Qwen and Gemma share: pre-norm, rotary grouped-query attention, gated MLP.

What differs between them is data (`DecoderConfig`). Submodules are called through `.forward`: hooks are of no use here,
and `nn.Module.__call__` costs more than some of these operations at one token a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from aioengine.attention.base import AttentionBackend, AttentionBatch, RotationInputs
from aioengine.checkpoint.lora import LoraAdapter
from aioengine.checkpoint.stored_tensor import StoredTensor
from aioengine.distributed.group import Group
from aioengine.errors import ModelError
from aioengine.layers.activation import find_activation, gated_op
from aioengine.layers.attention import Attention
from aioengine.layers.embedding import TokenEmbedding
from aioengine.layers.linear import Linear, RowParallelLinear
from aioengine.layers.norm import RMSNorm
from aioengine.layers.rope import PositionsInTable, RopeConfig, RotaryEmbedding, Rotation
from aioengine.models.base import CausalLM
from aioengine.models.config import DecoderConfig
from aioengine.models.lora import AdapterRun, LayerAdapters, PlainAdapters, lay_out
from aioengine.models.weights import WeightAssigner


def build_norm(config: DecoderConfig, size: int, *, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return RMSNorm(size, eps=config.rms_norm_eps, dtype=torch.float32 if config.norms_from_one else dtype, device=device)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim
        self.sizes = ((heads + kv_heads) * dim, kv_heads * dim)
        self.qkv_proj = Linear(
            config.hidden_size, (heads * dim, kv_heads * dim, kv_heads * dim), bias=config.qkv_bias, dtype=dtype, device=device
        )
        self.o_proj = RowParallelLinear(heads * dim, (config.hidden_size,), bias=config.output_bias, dtype=dtype, device=device)
        self.q_norm = build_norm(config, dim, dtype=dtype, device=device) if config.qk_norm else None
        self.k_norm = build_norm(config, dim, dtype=dtype, device=device) if config.qk_norm else None
        self.attn = Attention(backend, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=config.score_scale)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation | PositionsInTable,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        adapters: LayerAdapters | None = None,
    ) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        qkv = self.qkv_proj.forward(x)
        if adapters is not None:
            adapters.add("qkv", x, qkv)
        heads = self._attend(qkv, rotation, kv_cache, metadata)
        out = self.o_proj.forward(heads)
        return out if adapters is None else adapters.add("output", heads, out)

    def _attend(
        self, qkv: torch.Tensor, rotation: Rotation | PositionsInTable, kv_cache: torch.Tensor, metadata: AttentionBatch
    ) -> torch.Tensor:  # [n, num_heads * head_dim]
        if isinstance(rotation, PositionsInTable):
            return self.attn.forward_qkv(qkv, rotation=self.inputs(rotation), kv_cache=kv_cache, metadata=metadata)
        query_key, value = qkv.split_with_sizes(self.sizes, dim=-1)
        # Queries and keys turn by the same angles, so they stay together: half the operations.
        query_key = query_key.view(-1, self.num_heads + self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
            query_key = torch.cat((self.q_norm.forward(query), self.k_norm.forward(key)), dim=1)
        return self.attn.forward(rotation.apply(query_key), value, kv_cache=kv_cache, metadata=metadata)

    def inputs(self, rotation: PositionsInTable) -> RotationInputs:
        """What a backend needs to norm and rotate by itself."""
        if self.q_norm is None or self.k_norm is None:
            return RotationInputs(rotation.positions, rotation.table)
        return RotationInputs(rotation.positions, rotation.table, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        activation = find_activation(config.hidden_act)
        if activation is None:
            raise ModelError(f"config.json: hidden_act {config.hidden_act!r} is not supported")
        self.gated = gated_op(activation, device)
        hidden, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, (size, size), bias=config.mlp_bias, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(size, (hidden,), bias=config.mlp_bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, adapters: LayerAdapters | None = None) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        gate_up = self.gate_up_proj.forward(x)
        if adapters is not None:
            adapters.add("gate_up", x, gate_up)
        inner = self.gated(gate_up)
        out = self.down_proj.forward(inner)
        return out if adapters is None else adapters.add("down", inner, out)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, backend, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)
        norm = partial(build_norm, config, config.hidden_size, dtype=dtype, device=device)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        # (before the MLP, of what attention adds, of what the MLP adds). "post_attention" is the first to most families.
        self.norms: tuple[RMSNorm, RMSNorm | None, RMSNorm | None] = (self.post_attention_layernorm, None, None)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
            self.norms = (self.pre_feedforward_layernorm, self.post_attention_layernorm, self.post_feedforward_layernorm)

    def forward(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation | PositionsInTable,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        adapters: LayerAdapters | None = None,
    ) -> torch.Tensor:
        """normed, residual [n, hidden]: this layer's input, normalised and raw. Returns the MLP's output, not yet added
        to `residual`, which is updated in place: the next norm adds and normalises in one place."""
        attended = self.self_attn.forward(normed, rotation, kv_cache, metadata, adapters)
        before_mlp, of_attended, of_mlp = self.norms
        if of_attended is not None:
            attended = of_attended.forward(attended)
        added = self.mlp.forward(before_mlp.add_and_norm(attended, residual), adapters)
        return added if of_mlp is None else of_mlp.forward(added)


class RotaryTables:
    """One table for each kind of angles, and which of them a layer takes."""

    def __init__(self, config: DecoderConfig, *, device: torch.device) -> None:
        kinds: list[RopeConfig] = []
        for rope in config.rope_of_layers:
            if rope not in kinds:
                kinds.append(rope)
        size, count = config.head_dim, config.max_position_embeddings
        self.distinct = [RotaryEmbedding(rope, head_dim=size, max_positions=count, device=device) for rope in kinds]
        self.of_layers = [kinds.index(rope) for rope in config.rope_of_layers]


class Decoder(nn.Module):
    """Embedding, layers and final norm: what checkpoints call "model"."""

    def __init__(self, config: DecoderConfig, backend: AttentionBackend, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(config, backend, dtype=dtype, device=device) for _ in range(config.num_layers))
        self.norm = build_norm(config, config.hidden_size, dtype=dtype, device=device)
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        tables = RotaryTables(config, device=device)
        # By table where the backend rotates as it writes the keys; else the angles are gathered once for all layers.
        self.rotations: list[Callable[[torch.Tensor, torch.dtype], Rotation | PositionsInTable]]
        self.rotations = [rotary.places if backend.fuses_rope else rotary.gather for rotary in tables.distinct]
        # The modules in the order they run, and which angles and KV-cache group they take, as plain attributes: no lookup through
        # nn.Module in the loop below.
        self.plan: list[tuple[DecoderLayer, RMSNorm, int, int]] = [
            (layer, layer.input_layernorm, angles, group)  # type: ignore[misc]
            for layer, angles, group in zip(self.layers, tables.of_layers, config.layer_groups, strict=True)
        ]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        kv_caches: list[torch.Tensor],
        attention_metadata: tuple[AttentionBatch, ...],
        adapters: Sequence[LayerAdapters | None],  # one a layer
    ) -> torch.Tensor:
        residual = self.embed_tokens.forward(input_ids)
        if self.embedding_scale != 1.0:
            residual = residual.mul_(self.embedding_scale)
        rotations = [rotation(positions, residual.dtype) for rotation in self.rotations]
        added: torch.Tensor | None = None
        for (layer, norm, angles, group), kv_cache, adapted in zip(self.plan, kv_caches, adapters, strict=True):
            normed = norm.forward(residual) if added is None else norm.add_and_norm(added, residual)
            added = layer.forward(normed, residual, rotations[angles], kv_cache, attention_metadata[group], adapted)
        assert added is not None  # a config has at least one layer
        return self.norm.add_and_norm(added, residual)


class DecoderForCausalLM(CausalLM):
    """`Decoder` and a head over the vocabulary, tied to the embedding or not."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: DecoderConfig, *, attention_backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.num_layers = config.num_layers
        self.layer_groups = config.layer_groups
        self._adapters = PlainAdapters()
        self.model = Decoder(config, attention_backend, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = TokenEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)

    @classmethod
    def build(cls, config: DecoderConfig, *, attention_backend: AttentionBackend, dtype: torch.dtype, device: torch.device) -> CausalLM:
        return cls(config, attention_backend=attention_backend, dtype=dtype, device=device)

    def join(self, group: Group) -> None:
        for module in self.modules():
            if isinstance(module, RowParallelLinear):
                module.group = group

    def load_adapter(self, name: str, adapter: LoraAdapter) -> None:
        weight = self.model.plan[0][0].mlp.down_proj.weight
        self._adapters.load(name, lay_out(adapter, self.config), dtype=weight.dtype, device=weight.device)

    def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    def load_weights(self, tensors: Iterable[StoredTensor]) -> None:
        assigner = WeightAssigner(self, self.packed_modules_mapping)
        for stored in tensors:
            # Some checkpoints repeat what follows from the config: the tied head, the rotary frequencies.
            if stored.name.endswith("rotary_emb.inv_freq") or (self.config.tie_word_embeddings and stored.name == "lm_head.weight"):
                continue
            assigner.assign(stored)
        assigner.check_complete()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        *,
        kv_caches: list[torch.Tensor],
        attention_metadata: tuple[AttentionBatch, ...],
        adapters: Sequence[AdapterRun] = (),
    ) -> torch.Tensor:
        adapted = self._adapters.of_layers(adapters, self.num_layers)
        return self.model.forward(input_ids, positions, kv_caches=kv_caches, attention_metadata=attention_metadata, adapters=adapted)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.score(hidden)
