"""The native decoder against the torch one, on the same random checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from aioengine.attention.base import AttentionBatch, AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.checkpoint.stored_tensor import PackedRows
from aioengine.errors import ModelError
from aioengine.kv_cache_groups import group_layers
from aioengine.layers.rope import RopeConfig
from aioengine.models.base import CausalLM
from aioengine.models.config import DecoderConfig
from aioengine.models.decoder import DecoderForCausalLM
from aioengine.models.llama import LlamaForCausalLM
from aioengine.models.native_decoder import NativeDecoderForCausalLM, why_not_native
from aioengine_kernels.cpu import status

pytestmark = pytest.mark.skipif(status() is not None, reason=str(status()))
CPU = torch.device("cpu")
BASE = DecoderConfig(
    vocab_size=112,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope=RopeConfig(theta=1e4),
    tie_word_embeddings=True,
)
CONFIGS = {
    "llama": BASE,
    "qwen2": replace(BASE, qkv_bias=True, tie_word_embeddings=False),
    "qwen3": replace(BASE, qk_norm=True),
    "windows of two kinds": replace(BASE, num_layers=5, layer_windows=(9, None, 17, 9, None), qk_norm=True),
    "gemma3": replace(
        BASE,
        num_layers=3,
        qk_norm=True,
        hidden_act="gelu_pytorch_tanh",
        layer_windows=(9, None, 9),
        layer_ropes=(RopeConfig(theta=1e4), RopeConfig(theta=1e6), RopeConfig(theta=1e4)),
        attention_scale=0.25,
        embedding_scale=96**0.5,
        sandwich_norms=True,
    ),
    "window and biases": replace(BASE, layer_windows=(9, 9), qkv_bias=True, output_bias=True, mlp_bias=True),
}


@dataclass(frozen=True)
class Stored:
    name: str
    tensor: torch.Tensor  # float32
    packed: PackedRows | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self.tensor)

    def read_packed(self) -> PackedRows | None:
        return self.packed


def quantized(name: str, kind: str, rows: int, columns: int, rng: np.random.Generator) -> Stored:
    num_bytes, scales = {"Q4_1": (20, (0, 2)), "Q8_0": (34, (0,))}[kind]
    blocks = rng.integers(0, 256, (rows, columns // 32, num_bytes), dtype=np.uint8)
    for offset in scales:
        scale = rng.uniform(0.001, 0.01, blocks.shape[:2]) * (-7.5 if offset else 1.0 if kind == "Q4_1" else 0.1)
        blocks[..., offset : offset + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    data = blocks.reshape(rows, -1)
    dense = dequantize(data, GGMLQuantizationType[kind]).astype(np.float32)
    return Stored(name, torch.from_numpy(dense), PackedRows(kind, torch.from_numpy(data)))


def checkpoint(config: DecoderConfig, kind: str) -> Iterator[Stored]:
    rng = np.random.default_rng(0)
    heads, kv_heads, c = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config

    def vector(name: str, size: int, scale: float = 0.2, offset: float = 1.0) -> Stored:
        return Stored(name, torch.from_numpy((rng.standard_normal(size) * scale + offset).astype(np.float32)))

    def matrix(name: str, rows: int, columns: int, kind: str = kind) -> Stored:
        if kind != "dense":
            return quantized(name, kind, rows, columns, rng)
        return Stored(name, torch.from_numpy((rng.standard_normal((rows, columns)) * 0.1).astype(np.float32)))

    yield matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    if not c.tie_word_embeddings:
        yield matrix("lm_head.weight", c.vocab_size, c.hidden_size)
    yield vector("model.norm.weight", c.hidden_size)
    for i in range(c.num_layers):
        path = f"model.layers.{i}"
        attention = {
            "q": (heads, c.hidden_size),
            "k": (kv_heads, c.hidden_size),
            "v": (kv_heads, c.hidden_size),
            "o": (c.hidden_size, heads),
        }
        for name, (rows, columns) in attention.items():
            yield matrix(f"{path}.self_attn.{name}_proj.weight", rows, columns)
            if c.output_bias if name == "o" else c.qkv_bias:
                yield vector(f"{path}.self_attn.{name}_proj.bias", rows, offset=0.0)
        mlp = {"gate": (c.intermediate_size, c.hidden_size), "up": (c.intermediate_size, c.hidden_size)}
        for name, (rows, columns) in (mlp | {"down": (c.hidden_size, c.intermediate_size)}).items():
            yield matrix(f"{path}.mlp.{name}_proj.weight", rows, columns)
            if c.mlp_bias:
                yield vector(f"{path}.mlp.{name}_proj.bias", rows, offset=0.0)
        more = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if c.sandwich_norms else ()
        for name in ("input_layernorm", "post_attention_layernorm", *more):
            yield vector(f"{path}.{name}.weight", c.hidden_size)
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield vector(f"{path}.self_attn.{name}.weight", c.head_dim)


def attention_config(config: DecoderConfig) -> AttentionConfig:
    return AttentionConfig(config.num_heads, config.num_kv_heads, config.head_dim, 16, torch.float32, torch.float32)


def logits_of(model: CausalLM, backend: TorchPagedBackend | CpuPagedBackend, chunks: list[int], *, vocabulary: int = 112) -> torch.Tensor:
    """One request of sum(chunks) tokens, block table [2, 0, 3]."""
    assert isinstance(model, DecoderForCausalLM | NativeDecoderForCausalLM)
    windows = [group.sliding_window for group in group_layers(model.config.layer_windows)]
    caches = [backend.allocate_kv_cache(4, CPU) for _ in range(model.num_layers)]
    table, end, parts = torch.tensor([[2, 0, 3]], dtype=torch.int32), 0, []
    ids = torch.arange(sum(chunks)) * 7 % vocabulary
    for count in chunks:
        start, end = end, end + count
        starts, lens, position = np.array([0, count], dtype=np.int32), np.array([end], dtype=np.int32), torch.arange(start, end)
        slots = table[0, position // 16].long() * 16 + position % 16
        metadata = [
            backend.build_metadata(
                AttentionBatch(1, count, count, end, torch.from_numpy(starts), starts, torch.from_numpy(lens), lens, table, slots, window)
            )
            for window in windows
        ]
        with torch.inference_mode():
            hidden = model.forward(ids[start:end], position, kv_caches=caches, attention_metadata=tuple(metadata))
            parts.append(model.compute_logits(hidden))
    return torch.cat(parts)


def native(config: DecoderConfig, *, fast: bool) -> tuple[NativeDecoderForCausalLM, CpuPagedBackend]:
    backend = CpuPagedBackend(attention_config(config))
    return NativeDecoderForCausalLM(config, attention_backend=backend, fast=fast), backend


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "dense"])
def test_logits_equal_the_torch_model(name: str, kind: str) -> None:
    config = CONFIGS[name]
    backend = TorchPagedBackend(attention_config(config))
    reference: CausalLM = LlamaForCausalLM(config, attention_backend=backend, dtype=torch.float32, device=CPU)
    assert isinstance(reference, DecoderForCausalLM)
    reference.load_weights(checkpoint(config, kind))
    want = logits_of(reference, backend, [40])
    for fast, tolerance in ((False, 1e-4), (True, 0.1)):
        model, cpu = native(config, fast=fast)
        model.load_weights(checkpoint(config, kind))
        got = logits_of(model, cpu, [40])
        assert float((got - want).norm() / want.norm()) < tolerance
        assert torch.equal(logits_of(model, cpu, [3, 1, 1, 29, 6]), got)


@pytest.mark.parametrize("kind", ["Q8_0", "dense"])
def test_greedy_tokens_are_the_arg_max_of_the_logits(kind: str) -> None:
    from aioengine_kernels.cpu import supported_isas

    for fast in (False, True):
        model, _ = native(CONFIGS["llama"], fast=fast)
        model.load_weights(checkpoint(CONFIGS["llama"], kind))
        hidden = torch.randn(9, CONFIGS["llama"].hidden_size, generator=torch.Generator().manual_seed(3))
        tokens = model.greedy_tokens(hidden)
        if fast and kind == "Q8_0" and supported_isas()[-1] == "avx512":
            assert tokens is not None
            assert tokens.tolist() == model.compute_logits(hidden).argmax(dim=-1).tolist()
        elif not fast or kind == "dense":
            assert tokens is None


def checkpoint_with(config: DecoderConfig, kinds: dict[str, str]) -> tuple[list[Stored], int]:
    """A Q4_1 checkpoint in which the named projections of every layer are stored otherwise, and the bytes of all matrices."""
    rng, tensors = np.random.default_rng(1), []
    for t in checkpoint(config, "Q4_1"):
        kind = next((kind for part, kind in kinds.items() if f".{part}." in t.name and t.name.endswith("weight")), None)
        if kind == "dense":
            t = Stored(t.name, t.tensor)
        elif kind is not None:
            rows, columns = t.shape
            t = quantized(t.name, kind, rows, columns, rng)
        tensors.append(t)
    return tensors, sum(t.packed.data.numel() for t in tensors if t.packed is not None)


@pytest.mark.parametrize(
    "kinds", [{"v_proj": "Q8_0"}, {"k_proj": "Q8_0", "up_proj": "Q8_0"}, {"v_proj": "dense"}, {"q_proj": "Q8_0", "gate_proj": "dense"}]
)
@pytest.mark.parametrize("name", ["llama", "window and biases"])
def test_parts_that_are_stored_differently_each_keep_their_format(name: str, kinds: dict[str, str]) -> None:
    """As Q4_K_M files do. Every part must land in its own columns with its own bias."""
    config = CONFIGS[name]
    tensors, _ = checkpoint_with(config, kinds)
    backend = TorchPagedBackend(attention_config(config))
    reference: CausalLM = LlamaForCausalLM(config, attention_backend=backend, dtype=torch.float32, device=CPU)
    assert isinstance(reference, DecoderForCausalLM)
    reference.load_weights(tensors)
    want = logits_of(reference, backend, [20])
    for fast, tolerance in ((False, 1e-4), (True, 0.1)):
        model, cpu = native(config, fast=fast)
        model.load_weights(tensors)
        got = logits_of(model, cpu, [20])
        assert float((got - want).norm() / want.norm()) < tolerance
        assert torch.equal(logits_of(model, cpu, [1, 4, 15]), got)


def test_mixed_parts_are_not_blown_up() -> None:
    tensors, num_bytes = checkpoint_with(BASE, {"v_proj": "Q8_0", "up_proj": "Q8_0"})
    model, _ = native(BASE, fast=False)
    model.load_weights(tensors)
    assert model._embedding is not None
    layers = [getattr(layer, name) for layer in model._layers for name in ("qkv", "output", "gate_up", "down")]
    assert num_bytes <= sum(matrix.nbytes for matrix in (*layers, model._embedding)) < 1.01 * num_bytes  # panels are padded to 64 bytes


@pytest.mark.parametrize(
    ("change", "message"), [("missing", "lacks model.norm.weight"), ("extra", "other.weight .* none of"), ("shape", "has shape")]
)
def test_damaged_checkpoints(change: str, message: str) -> None:
    tensors = {t.name: t for t in checkpoint(BASE, "dense")}
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "extra":
        tensors["other.weight"] = Stored("other.weight", torch.zeros(3))
    else:
        tensors["model.norm.weight"] = Stored("model.norm.weight", torch.zeros(3))
    with pytest.raises(ModelError, match=message):
        native(BASE, fast=False)[0].load_weights(tensors.values())


def test_says_what_it_cannot_do() -> None:
    backend = CpuPagedBackend(attention_config(BASE))
    assert why_not_native(LlamaForCausalLM, BASE, backend=backend, dtype=torch.float32, device=CPU) is None
    assert "gelu" in str(
        why_not_native(LlamaForCausalLM, replace(BASE, hidden_act="gelu"), backend=backend, dtype=torch.float32, device=CPU)
    )
    assert "bfloat16" in str(why_not_native(LlamaForCausalLM, BASE, backend=backend, dtype=torch.bfloat16, device=CPU))
    assert "cpu_paged" in str(
        why_not_native(LlamaForCausalLM, BASE, backend=TorchPagedBackend(backend.config), dtype=torch.float32, device=CPU)
    )
