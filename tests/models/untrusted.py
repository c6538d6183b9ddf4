"""For the tests of untrusted model files: tiny valid ones, ways to damage them, and a watch over what reading them takes."""

from __future__ import annotations

import json
import resource
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import gguf
import hypothesis.strategies as st
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, settings

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.safetensors import find_safetensors
from aioengine.errors import ModelError
from aioengine.models.base import CausalLM
from aioengine.models.info import read_model_info
from aioengine.models.loader import load_model
from aioengine_kernels.cpu import status as native_status

Weights = Literal["dense", "exact", "fast"]
CPU = torch.device("cpu")
MAX_BYTES = 32 << 20  # the files here have some 100 kB
MAX_SECONDS = 1.0
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
U64 = (1 << 64) - 1
HIDDEN, SIZE, LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 32, 64, 2, 2, 1, 16, 48
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@contextmanager
def refused(path: Path, message: str) -> Iterator[None]:
    """The block, `bounded`, raises a ModelError with this message (a pattern) that names the file."""
    with bounded(), pytest.raises(ModelError, match=message) as failure:
        yield
    assert path.name in str(failure.value)


@contextmanager
def bounded() -> Iterator[None]:
    """The block takes neither more than a second nor more than a fixed amount of memory, Python's and torch's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
    finally:
        spent = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert peak < MAX_BYTES, f"{peak} bytes of Python objects"
    assert grown < 4 * MAX_BYTES, f"the process grew by {grown} bytes"
    assert spent < MAX_SECONDS, f"{spent:.2f} s"


def model_or_error(action: Callable[[], object]) -> ModelError | None:
    """Runs it, bounded; anything but success and ModelError passes through and fails the test."""
    error: ModelError | None = None
    with bounded():
        try:
            action()
        except ModelError as failure:
            error = failure
    assert len(str(error)) < 2000, "a message is for reading"
    return error


# ---------------------------------------------------------------------------------------------------- tiny valid files
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        path = f"model.layers.{i}"
        for name in ("q", "k", "v"):
            shapes[f"{path}.self_attn.{name}_proj.weight"] = ((HEADS if name == "q" else KV_HEADS) * DIM, HIDDEN)
        shapes[f"{path}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * DIM)
        shapes |= {f"{path}.mlp.{name}_proj.weight": (SIZE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{path}.mlp.down_proj.weight"] = (HIDDEN, SIZE)
        shapes |= {f"{path}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"{x}_proj": f"attn_{x}" for x in "qkv"},
    "o_proj": "attn_output",
    **{f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    words = name.split(".")
    return f"{'blk.' + words[2] + '.' if words[1] == 'layers' else ''}{GGUF_NAMES[words[-2]]}.weight"


def write_gguf(path: Path, *, kind: GGMLQuantizationType = GGMLQuantizationType.Q4_1, extra: dict[str, Any] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * VOCAB)
    for name, tensor in tensors().items():
        if tensor.dim() == 1:
            writer.add_tensor(gguf_name(name), tensor.numpy())
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def files_of(folder: Path) -> ModelFiles:
    if (folder / "m.gguf").exists():
        return ModelFiles(str(folder), folder, (folder / "m.gguf",), "gguf")
    return ModelFiles(str(folder), folder, find_safetensors(folder), "safetensors")


def load(folder: Path, weights: Weights = "dense") -> CausalLM:
    """The whole way from files to a model that holds its weights."""
    files = files_of(folder)
    info = read_model_info(files)
    config = AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32)
    backend: AttentionBackend = TorchPagedBackend(config) if weights == "dense" else CpuPagedBackend(config)
    return load_model(files, info=info, device=CPU, dtype=torch.float32, attention_backend=backend, weights=weights)


MODES: list[Weights] = ["dense", *(["exact", "fast"] if native_status() is None else [])]  # type: ignore[list-item]


# ---------------------------------------------------------------------------------------------------- any damage
@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few edits: bits flipped, bytes and whole counts replaced, a piece cut out, repeated or missing at the end."""
    kind = draw(st.sampled_from(["flip", "count", "cut", "repeat", "truncate"]))
    # Mostly in the first tenth, where the fields are.
    place = draw(st.floats(0, 1)) * draw(st.sampled_from([1.0, 0.1, 0.1, 0.01]))
    length = draw(st.integers(1, 64))
    word = draw(st.sampled_from([0, 1, 0xFF, 1 << 31, 1 << 32, 1 << 62, U64]) | st.integers(0, U64))
    rest = draw(damages()) if draw(st.integers(0, 3)) == 0 else None

    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        match kind:
            case "flip":
                content = content[:at] + bytes(byte ^ (1 << word % 8) for byte in content[at : at + 1]) + content[at + 1 :]
            case "count":
                content = content[:at] + struct.pack("<Q", word) + content[at + 8 :]
            case "cut":
                content = content[:at] + content[at + length :]
            case "repeat":
                content = content[: at + length] + content[at:]
            case "truncate":
                content = content[:at]
        return rest(content) if rest is not None else content

    return damage


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.integers() | st.floats() | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=5,
)
