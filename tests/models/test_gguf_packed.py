"""Quantized GGUF files on the native kernels: blocks stay blocks where a packed form holds them, and the rest is announced."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aioengine.attention.base import AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.checkpoint.files import ModelFiles
from aioengine.models.base import CausalLM
from aioengine.models.info import read_model_info, resolve_model
from aioengine.models.loader import load_model
from aioengine.models.native_decoder import NativeDecoderForCausalLM
from aioengine_kernels.cpu import PackedMatrix, status
from aioengine_kernels.cpu.packing import FORMATS, gather_rows
from tests.checkpoint.test_gguf_tokenizer import LETTERS
from tests.models.support import CPU

pytestmark = pytest.mark.skipif(status() is not None, reason=str(status()))

HIDDEN, VOCAB = 256, 256
# Where the float16 scales of a block are; those of the others do not matter here.
SCALES = {"Q5_K": (0, 2), "Q5_1": (0, 2), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q3_K": (108,), "MXFP4": (), "Q2_K": (80, 82), "IQ3_S": (0,)}
PACKED = ("Q5_K", "Q5_1", "IQ4_NL", "IQ4_XS", "Q3_K", "MXFP4")


def random_blocks(kind: str, rows: int, columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    rng = np.random.default_rng(rows + columns)
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    for offset in SCALES[kind]:
        blocks[..., offset : offset + 2] = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 118
    return blocks.reshape(rows, -1)


def write_model(path: Path, kind: str) -> Path:
    quantized = GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "qwen2")  # its rows are not reordered
    for key, value in {"context_length": 64, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": HIDDEN}.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(LETTERS))
    writer.add_array("tokenizer.ggml.merges", [" "])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", random_blocks(kind, HIDDEN, HIDDEN), raw_dtype=quantized)
    writer.add_tensor("token_embd.weight", random_blocks(kind, VOCAB, HIDDEN), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(files: ModelFiles) -> NativeDecoderForCausalLM:
    info = read_model_info(files)
    config = AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32)
    model: CausalLM = load_model(
        files, info=info, device=CPU, dtype=torch.float32, attention_backend=CpuPagedBackend(config), weights="exact"
    )
    assert isinstance(model, NativeDecoderForCausalLM)
    return model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))


def matrices(model: NativeDecoderForCausalLM) -> list[PackedMatrix]:
    found = [model._embedding, *(getattr(model._layers[0], name) for name in ("qkv", "output", "gate_up", "down"))]
    assert all(isinstance(matrix, PackedMatrix) for matrix in found)
    return [matrix for matrix in found if isinstance(matrix, PackedMatrix)]


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_stay_blocks_without_loss(kind: str, tmp_path: Path, cache: None, caplog: pytest.LogCaptureFixture) -> None:
    files = resolve_model(str(write_model(tmp_path / "m.gguf", kind)))
    with caplog.at_level(logging.WARNING):
        model = load(files)
    assert "in memory" not in caplog.text
    for matrix in matrices(model):
        assert FORMATS[matrix.kind] > FORMATS["BF16"]
        assert matrix.nbytes < 0.35 * 4 * matrix.rows * matrix.columns
    embedding = matrices(model)[0]
    expected = torch.from_numpy(gguf.dequantize(random_blocks(kind, VOCAB, HIDDEN), GGMLQuantizationType[kind]))
    assert torch.equal(gather_rows(embedding, torch.arange(VOCAB)), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "IQ3_S"])
def test_what_has_no_packed_form_is_announced_with_its_size(
    kind: str, tmp_path: Path, cache: None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path / "m.gguf", kind)
    files = resolve_model(str(path))
    with caplog.at_level(logging.WARNING):
        model = load(files)
    (line,) = [record.getMessage() for record in caplog.records if "in memory" in record.getMessage()]
    num_bytes = 4 * 8 * HIDDEN * HIDDEN
    stored = 8 * random_blocks(kind, HIDDEN, HIDDEN).size
    assert re.match(rf"weights of {stored} bytes in the file take {num_bytes} bytes in memory, as float32: no packed form of {kind}", line)
    expected = torch.from_numpy(gguf.dequantize(random_blocks(kind, VOCAB, HIDDEN), GGMLQuantizationType[kind]))
    assert torch.equal(gather_rows(matrices(model)[0], torch.arange(VOCAB)), expected)
