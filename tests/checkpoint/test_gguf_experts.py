"""Mixtures of experts from GGUF files, dequantized, give the log-probabilities of the model that was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType

from aioengine import AsyncEngine, SamplingParams
from aioengine.attention.base import AttentionConfig
from aioengine.attention.cpu_paged import CpuPagedBackend
from aioengine.errors import ModelError
from aioengine.models.fallback.packed import PackedExperts
from aioengine.models.info import read_model_info, resolve_model
from aioengine.models.loader import load_model
from aioengine_kernels.cpu import PackedMatrix, status
from tests.checkpoint.test_gguf import add_tokenizer, begin_gguf, permuted
from tests.models.fallback_cases import random_model

VOCAB = 96
needs_native = pytest.mark.skipif(status() is not None, reason=str(status()))
_PARTS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate": "ffn_gate_inp",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))


def tiny(kind: str) -> transformers.PreTrainedModel:
    return random_model(
        kind, vocab_size=VOCAB, head_dim=16, sliding_window=None, bos_token_id=1, eos_token_id=2, pad_token_id=2, norm_topk_prob=True
    )


def write(
    path: Path,
    model: transformers.PreTrainedModel,
    architecture: str,
    *,
    quantized: bool,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """As llama.cpp's converter writes it. quantized: the model's matrices become what the file holds."""
    config: Any = model.config
    writer = begin_gguf(path, architecture, config)
    writer.add_value_length(config.head_dim)
    writer.add_expert_count(4)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer)
    if extra is not None:
        extra(writer)
    for name, parameter in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            gate, up = parameter.chunk(2, dim=1)
            parts = {"ffn_gate_exps": gate, "ffn_up_exps": up}
        elif name.endswith("experts.down_proj"):
            parts = {"ffn_down_exps": parameter}
        else:
            parts = {_TOP.get(name) or _PARTS[name.split(".")[-2]]: parameter}
        for part, tensor in parts.items():
            full = part if name in _TOP else f"blk.{name.split('.')[2]}.{part}.weight"
            put(writer, full, tensor, quantized=quantized, heads={"attn_q": 4, "attn_k": 2}.get(part) if architecture == "llama" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, *, quantized: bool, heads: int | None) -> None:
    weights = tensor.numpy().copy()
    if not quantized or weights.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, permuted(weights, heads) if heads else weights)
        return
    kind = GGMLQuantizationType.Q8_0
    tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weights, kind), kind)))  # a view of the model's
    writer.add_tensor(name, gguf.quantize(permuted(weights, heads) if heads else weights, kind), raw_dtype=kind)


async def differences(path: Path, model: transformers.PreTrainedModel, weights: str) -> torch.Tensor:
    """Of the log-probabilities of a prompt, ours from the file and the model's."""
    prompt = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    async with AsyncEngine(str(path), kv_cache_dtype="float32", max_model_len=64, weights=weights) as engine:
        (output,) = await engine.generate_batch([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1), progress=False)
    with torch.inference_mode():
        expected: torch.Tensor = model(input_ids=torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert output.prompt_logprobs is not None
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if entry is not None]
    return (torch.tensor(found) - expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]).abs()


FAMILIES = [("mixtral", "llama"), ("qwen3_moe", "qwen3moe")]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("weights", ["dense", pytest.param("exact", marks=needs_native)])
@pytest.mark.parametrize(("kind", "architecture"), FAMILIES)
async def test_a_written_file_gives_the_logprobs_it_was_made_from(
    kind: str, architecture: str, weights: str, quantized: bool, tmp_path: Path
) -> None:
    model = tiny(kind)
    with torch.no_grad():
        path = write(tmp_path / "m.gguf", model, architecture, quantized=quantized)
    # Quantized weights meet activations of 16 bits.
    assert (await differences(path, model, weights)).max() < (3e-3 if quantized and weights == "exact" else 2e-5)


@needs_native
@pytest.mark.parametrize(("kind", "architecture"), FAMILIES)
async def test_in_8_bits_most_tokens_keep_their_logprobs(kind: str, architecture: str, tmp_path: Path) -> None:
    """Not all: where two experts are nearly tied, rounding chooses the other one."""
    model = tiny(kind)
    with torch.no_grad():
        path = write(tmp_path / "m.gguf", model, architecture, quantized=True)
    found = await differences(path, model, "fast")
    assert 1e-4 < found.median() < 0.1


@needs_native
async def test_weights_of_experts_stay_packed(tmp_path: Path) -> None:
    """Those of a file with blocks of 8 bits take a little over 8 bits each."""
    model = tiny("qwen3_moe")
    with torch.no_grad():
        files = resolve_model(str(write(tmp_path / "m.gguf", model, "qwen3moe", quantized=True)))
    info = read_model_info(files)
    config = AttentionConfig(info.num_heads, info.num_kv_heads, info.head_dim, 16, torch.float32, torch.float32)
    cpu = torch.device("cpu")
    loaded = load_model(files, info=info, device=cpu, dtype=torch.float32, attention_backend=CpuPagedBackend(config), weights="exact")
    experts = [module for module in loaded.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == 4
    assert not [name for name, _ in loaded.named_parameters() if "experts" in name]
    matrices = experts[0]._gate_up + experts[0]._down
    assert len(matrices) == 8
    assert {matrix.kind for matrix in matrices if isinstance(matrix, PackedMatrix)} == {"Q8_0"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 9, r"expert_used_count must be at most expert_count \(4\), got 9"),
        ("expert_gating_func", 2, r"expert_gating_func must be 1 \(softmax\), got 2"),
        ("expert_weights_scale", 2.5, "expert_weights_scale is not supported"),
        ("expert_shared_count", 1, "expert_shared_count is not supported"),
    ],
)
def test_keys_that_change_the_result_are_refused(key: str, value: float, message: str, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop(f"qwen3moe.{key}", None)
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"qwen3moe.{key}", value)

    path = write(tmp_path / "m.gguf", tiny("qwen3_moe"), "qwen3moe", quantized=False, extra=extra)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(path))
