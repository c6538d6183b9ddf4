"""Random tiny checkpoints, and the plainest attention backend that satisfies the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from aioengine.attention.base import AttentionBackend, AttentionBatch, AttentionConfig
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.safetensors import find_safetensors
from aioengine.kv_cache_groups import group_layers
from aioengine.models.base import CausalLM
from aioengine.models.decoder import DecoderForCausalLM
from aioengine.models.info import read_model_info
from aioengine.models.loader import load_model

VOCAB = 96
CPU = torch.device("cpu")


class DenseBackend(AttentionBackend):
    """One request, one sequence: the cache is a plain [2, max_tokens, kv_heads, head_dim] array, block size 1."""

    name = "dense-test"

    @classmethod
    def supports(cls, config: AttentionConfig, device: torch.device) -> str | None:
        return None

    def allocate_kv_cache(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(2, num_blocks, self.config.num_kv_heads, self.config.head_dim, dtype=self.config.kv_cache_dtype, device=device)

    def kv_cache_bytes_per_block(self) -> int:
        return 2 * 4 * self.config.num_kv_heads * self.config.head_dim

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        end, count = int(metadata.seq_lens_np[0]), metadata.num_tokens
        kv_cache[0, end - count : end], kv_cache[1, end - count : end] = key, value
        group = self.config.num_heads // self.config.num_kv_heads
        keys, values = (cache[:end].repeat_interleave(group, dim=1) for cache in kv_cache)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        distance = torch.arange(end - count, end)[:, None] - torch.arange(end)[None]
        hidden = distance < 0
        if metadata.sliding_window is not None:
            hidden |= distance >= metadata.sliding_window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    def zero_blocks(self, kv_cache: torch.Tensor, block_ids: list[int]) -> None:
        kv_cache[:, block_ids] = 0


@dataclass(frozen=True)
class Case:
    """A family's tiny config; sizes are odd on purpose where the family allows it."""

    config: transformers.PreTrainedConfig
    model_class: type[transformers.PreTrainedModel]


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3: dict[str, Any] = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def cases() -> dict[str, Case]:
    def llama(**more: Any) -> Case:
        return Case(transformers.LlamaConfig(**{**_SHAPE, **more}), transformers.LlamaForCausalLM)

    return {
        "llama": llama(),
        "llama-tied": llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
        "llama-bias": llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4),
        "llama-head-dim": llama(head_dim=32),
        "llama3-rope": llama(rope_parameters=_LLAMA3),
        "llama-linear": llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
        "llama-yarn": llama(rope_parameters=_YARN),
        "llama-dynamic": llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "mistral": Case(transformers.MistralConfig(**_SHAPE, sliding_window=None), transformers.MistralForCausalLM),
        "mistral-window": Case(transformers.MistralConfig(**_SHAPE, sliding_window=7), transformers.MistralForCausalLM),
        "qwen2": Case(transformers.Qwen2Config(**_SHAPE), transformers.Qwen2ForCausalLM),
        "qwen2-tied": Case(transformers.Qwen2Config(**_SHAPE, tie_word_embeddings=True), transformers.Qwen2ForCausalLM),
        "qwen2-window": Case(
            transformers.Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=0),
            transformers.Qwen2ForCausalLM,
        ),
        "mistral-mixed": Case(
            transformers.MinistralConfig(
                **_SHAPE, head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
            ),
            transformers.MinistralForCausalLM,
        ),
        "qwen2-mixed": Case(
            transformers.Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
            transformers.Qwen2ForCausalLM,
        ),
        "qwen3-mixed": Case(
            transformers.Qwen3Config(
                **_SHAPE,
                head_dim=16,
                use_sliding_window=True,
                sliding_window=5,
                layer_types=["full_attention", "full_attention", "sliding_attention"],
            ),
            transformers.Qwen3ForCausalLM,
        ),
        "gemma3": Case(transformers.Gemma3TextConfig(**_GEMMA3), transformers.Gemma3ForCausalLM),
        "gemma3-window": Case(transformers.Gemma3TextConfig(**{**_GEMMA3, "sliding_window": 7}), transformers.Gemma3ForCausalLM),
        "gemma3-linear": Case(
            transformers.Gemma3TextConfig(**_GEMMA3, rope_parameters=_GEMMA3_ROPE, attention_bias=True), transformers.Gemma3ForCausalLM
        ),
        "qwen3": Case(transformers.Qwen3Config(**_SHAPE, head_dim=32), transformers.Qwen3ForCausalLM),
        "qwen3-tied": Case(transformers.Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True), transformers.Qwen3ForCausalLM),
    }


def random_model(case: Case) -> transformers.PreTrainedModel:
    """Weights wide enough that a wrong rotation, mask or norm moves the logits by far more than rounding."""
    torch.manual_seed(11)
    model: transformers.PreTrainedModel = case.model_class(case.config)
    model.eval()
    from_one = isinstance(case.config, transformers.Gemma3TextConfig)  # it adds the 1 itself
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if "norm" in name and not from_one else 0.0))
    return model


def load_reference(folder: Path, **options: Any) -> transformers.PreTrainedModel:
    """A checkpoint as transformers reads it, in float32."""
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model


def reference_from_gguf(files: ModelFiles) -> transformers.PreTrainedModel:
    """A GGUF file of a Llama or a Gemma 3 as a transformers model in float32, read with the gguf package's own reader and names.

    (transformers reads GGUF weights only where accelerate is installed.)
    """
    config = transformers.AutoConfig.from_pretrained(files.folder)
    gemma = config.model_type == "gemma3_text"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3 if gemma else gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for path in files.weights for tensor in gguf.GGUFReader(path).tensors}
    family: type[transformers.PreTrainedModel] = transformers.Gemma3ForCausalLM if gemma else transformers.LlamaForCausalLM
    reference = family(config)
    state: dict[str, torch.Tensor] = {}
    for name in reference.state_dict():
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = stored.get(key or "", stored["token_embd.weight"] if name == "lm_head.weight" else None)
        assert tensor is not None, name
        weights = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if gemma and name.endswith("norm.weight"):  # llama.cpp stores the 1 that transformers adds
            weights -= 1.0
        elif heads and not gemma:  # llama.cpp rotates neighbours, transformers halves
            weights = torch.cat([part.view(-1, 2, part.shape[1]).swapaxes(0, 1).flatten(0, 1) for part in weights.chunk(heads)])
        state[name] = weights
    reference.load_state_dict(state)
    reference.eval()
    return reference


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def load_ours(files: ModelFiles, dtype: torch.dtype = torch.float32) -> CausalLM:
    info = read_model_info(files)
    config = AttentionConfig(
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=1,
        dtype=dtype,
        kv_cache_dtype=dtype,
    )
    return load_model(files, info=info, device=CPU, dtype=dtype, attention_backend=DenseBackend(config))


def logits_of(model: CausalLM, token_ids: torch.Tensor, *, chunks: tuple[int, ...] | None = None) -> torch.Tensor:
    """Logits of every position, [n, vocab]; the sequence computed in steps of the given sizes, or at once."""
    total = len(token_ids)
    caches: list[torch.Tensor] | None = None
    rows, start = [], 0
    with torch.inference_mode():
        for size in chunks or (total,):
            attention = model.model.layers[0].self_attn.attn.backend  # type: ignore[union-attr,index]
            assert isinstance(attention, DenseBackend)
            if caches is None:
                caches = [attention.allocate_kv_cache(total, CPU) for _ in range(model.num_layers)]
            positions = torch.arange(start, start + size)
            hidden = model.forward(
                token_ids[start : start + size], positions, kv_caches=caches, attention_metadata=one_request(start, size, model)
            )
            rows.append(model.compute_logits(hidden))
            start += size
    return torch.cat(rows)


def one_request(start: int, size: int, model: CausalLM) -> tuple[AttentionBatch, ...]:
    """A step of the positions start .. start + size - 1 of one request, each position a block, for each KV-cache group."""
    bounds, lengths = np.array([0, size], dtype=np.int32), np.array([start + size], dtype=np.int32)
    batch = AttentionBatch(
        num_reqs=1,
        num_tokens=size,
        max_query_len=size,
        max_seq_len=start + size,
        query_start_loc=torch.from_numpy(bounds),
        query_start_loc_np=bounds,
        seq_lens=torch.from_numpy(lengths),
        seq_lens_np=lengths,
        block_table=torch.arange(start + size, dtype=torch.int32)[None],
        slot_mapping=torch.arange(start, start + size),
    )
    assert isinstance(model, DecoderForCausalLM)
    return tuple(replace(batch, sliding_window=group.sliding_window) for group in group_layers(model.config.layer_windows))


def reference_logits(model: transformers.PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=token_ids[None]).logits[0]
    return logits


def some_tokens(count: int = 41) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(5))


def save(model: transformers.PreTrainedModel, folder: Path, **options: Any) -> ModelFiles:
    """Write a transformers model into a folder."""
    model.save_pretrained(folder, **options)
    return ModelFiles(name=str(folder), folder=folder, weights=find_safetensors(folder), format="safetensors")
