"""The Triton backend's own part: layout, and which op gets what. Without a GPU the ops are their references in torch; the
kernels are tested in tests/kernels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioengine.attention.base import AttentionBatch, AttentionConfig, RotationInputs
from aioengine.attention.torch_paged import TorchPagedBackend
from aioengine.attention.triton_paged import TritonPagedBackend
from aioengine.layers.norm import RMSNorm
from aioengine.layers.rope import RopeConfig, RotaryEmbedding

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32, kv_cache_dtype=torch.float32)


def make_batch() -> AttentionBatch:
    """A decode at position 9, a whole prompt of 5, a chunk of 3 after 6."""
    query_start_loc = np.array([0, 1, 6, 9], dtype=np.int32)
    seq_lens = np.array([10, 5, 9], dtype=np.int32)
    table = torch.tensor([[7, 3, 9], [2, 5, 0], [1, 8, 4]], dtype=torch.int32)
    slots = [9 * 4 + 1, 8, 9, 10, 11, 20, 8 * 4 + 2, 8 * 4 + 3, 4 * 4]
    return AttentionBatch(
        num_reqs=3,
        num_tokens=9,
        max_query_len=5,
        max_seq_len=10,
        query_start_loc=torch.from_numpy(query_start_loc),
        query_start_loc_np=query_start_loc,
        seq_lens=torch.from_numpy(seq_lens),
        seq_lens_np=seq_lens,
        block_table=table,
        slot_mapping=torch.tensor(slots),
    )


def caches(config: AttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The same content in both backends' layouts."""
    content = torch.randn(2, 11, config.block_size, config.num_kv_heads, config.head_dim)
    ours = TritonPagedBackend(config).allocate_kv_cache(11, CPU)
    ours.copy_(content.transpose(0, 1))
    return ours, content


@pytest.mark.parametrize(
    ("config", "window"), [(CONFIG, None), (CONFIG, 3), (replace(CONFIG, logits_soft_cap=2.0), None)], ids=["full", "window", "cap"]
)
def test_equals_the_reference_backend(config: AttentionConfig, window: int | None) -> None:
    torch.manual_seed(0)
    ours, theirs = caches(config)
    batch = replace(make_batch(), sliding_window=window)
    query, key, value = torch.randn(9, 6, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    outputs = []
    pairs: list[tuple[Any, torch.Tensor]] = [(TritonPagedBackend(config), ours), (TorchPagedBackend(config), theirs)]
    for backend, kv_cache in pairs:
        outputs.append(backend.forward(query, key, value, kv_cache=kv_cache, metadata=backend.build_metadata(batch), scale=0.25))
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.transpose(0, 1), theirs)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotating_by_itself_equals_rotating_before(qk_norm: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = caches(CONFIG)
    batch, backend, reference = make_batch(), TritonPagedBackend(CONFIG), TorchPagedBackend(CONFIG)
    qkv, positions = torch.randn(9, 10 * 16), torch.tensor([9, 0, 1, 2, 3, 4, 6, 7, 8])
    rotary = RotaryEmbedding(RopeConfig(theta=10000.0), head_dim=16, max_positions=32, device=CPU)
    norms = [RMSNorm(16, eps=1e-6, dtype=torch.float32, device=CPU) for _ in range(2)]
    for norm in norms:
        norm.weight.data.uniform_(0.5, 1.5)
    query_weight, key_weight = (norm.weight if qk_norm else None for norm in norms)
    rotation = RotationInputs(positions, rotary.table, query_weight, key_weight, eps=1e-6)
    actual = backend.forward_qkv(qkv, rotation=rotation, kv_cache=ours, metadata=backend.build_metadata(batch), scale=0.25)

    query, key, value = qkv.view(9, 10, 16).split((6, 2, 2), dim=1)
    if qk_norm:
        query, key = norms[0](query), norms[1](key)
    angles = rotary.gather(positions, torch.float32)
    metadata = reference.build_metadata(batch)
    expected = reference.forward(angles.apply(query), angles.apply(key), value, kv_cache=theirs, metadata=metadata, scale=0.25)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.transpose(0, 1), theirs, atol=1e-6, rtol=1e-6)


def test_a_block_is_one_piece_and_is_zeroed_alone() -> None:
    backend = TritonPagedBackend(CONFIG)
    kv_cache = backend.allocate_kv_cache(5, CPU)
    assert not kv_cache.any()
    assert kv_cache[0].is_contiguous()
    assert kv_cache[0].nbytes == backend.kv_cache_bytes_per_block()
    kv_cache.fill_(1)
    backend.zero_blocks(kv_cache, [1, 3])
    assert [bool(block.any()) for block in kv_cache] == [True, False, True, False, True]


def test_says_why_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    supports = TritonPagedBackend.supports
    assert "TRITON_INTERPRET=1" in str(supports(CONFIG, CPU))
    assert "not mps" in str(supports(CONFIG, torch.device("mps")))
    if sys.platform == "linux":
        assert supports(CONFIG, CUDA) is None
        assert supports(replace(CONFIG, dtype=torch.bfloat16, kv_cache_dtype=torch.bfloat16), CUDA) is None
    assert "got 8" in str(supports(replace(CONFIG, head_dim=8), CUDA))
    assert "got 512" in str(supports(replace(CONFIG, head_dim=512), CUDA))
    assert "not a multiple of num_kv_heads (4)" in str(supports(replace(CONFIG, num_kv_heads=4), CUDA))
    assert "torch.float64" in str(supports(replace(CONFIG, dtype=torch.float64), CUDA))
    assert "torch.int8" in str(supports(replace(CONFIG, kv_cache_dtype=torch.int8), CUDA))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert supports(replace(CONFIG, head_dim=8), CPU) is None
    monkeypatch.setattr("aioengine.attention.triton_paged.find_spec", lambda name: None)
    assert supports(CONFIG, CPU) == "Triton is not installed"


def test_a_cpu_engine_never_imports_triton() -> None:
    """`auto` asks this backend first on every start."""
    code = (
        "import sys, torch\n"
        "from aioengine.attention.base import AttentionConfig\n"
        "from aioengine.attention.registry import select_attention_backend\n"
        "from aioengine.layers.norm import RMSNorm\n"
        "import aioengine.worker.worker\n"
        "f = torch.float32\n"
        "config = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, block_size=16, dtype=f, kv_cache_dtype=f)\n"
        "assert select_attention_backend('auto', config, torch.device('cpu')).name != 'triton'\n"
        "RMSNorm(8, eps=1e-6, dtype=f, device=torch.device('cpu'))\n"
        "assert 'triton' not in sys.modules\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
