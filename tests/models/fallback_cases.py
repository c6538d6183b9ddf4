"""Tiny random models of architectures that have no class of their own here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 272
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
_WINDOW = {"sliding_window": 9}
_MHA = {"num_key_value_heads": 4}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {**_MHA, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}

# model_type -> what differs from _SHAPE.
CASES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "aria_text": _EXPERTS,
    "bitnet": {},
    "codegen": {**_MHA, "rotary_dim": 8},
    "cohere": {},
    "cohere2": {**_WINDOW, "head_dim": 16},
    "cwm": _WINDOW,
    "deepseek_v2": {**_EXPERTS, **_LATENT},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "dots1": {**_EXPERTS, **_MHA},
    "ernie4_5": {},
    "ernie4_5_moe": _EXPERTS,
    "exaone4": {**_WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    "flex_olmo": _EXPERTS,
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, **_WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**_EXPERTS, "head_dim": 16},
    "gpt2": _MHA,
    "gpt_bigcode": {"multi_query": True},
    "gpt_neox": _MHA,
    "gptj": {**_MHA, "rotary_dim": 8},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "granitemoe": {**_EXPERTS, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    "helium": {"head_dim": 16},
    "hunyuan_v1_moe": {**_EXPERTS, "head_dim": 16},
    "minicpm3": _LATENT,
    "mixtral": {**_EXPERTS, **_WINDOW},
    "olmo": {"clip_qkv": 4.0},
    "olmo2": {},
    "olmo3": {**_WINDOW},
    "olmoe": _EXPERTS,
    "opt": {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": _MHA,
    "phi": {**_MHA, "partial_rotary_factor": 0.5},
    "phi3": _WINDOW,
    "phimoe": {**_EXPERTS, **_WINDOW},
    "qwen2_moe": {**_EXPERTS, **_WINDOW, "use_sliding_window": True, "max_window_layers": 2, "decoder_sparse_step": 2},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32},
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "starcoder2": _WINDOW,
    "vaultgemma": {**_GEMMA, **_WINDOW},
}


def random_model(kind: str, **more: Any) -> transformers.PreTrainedModel:
    """Weights wide enough that a wrong rotation, mask or norm moves the logits by far more than rounding."""
    config = transformers.AutoConfig.for_model(kind, **{**_SHAPE, **CASES.get(kind, {}), **more})
    torch.manual_seed(11)
    center = 0.0 if "gemma" in kind else 1.0  # theirs add the 1 themselves
    decoders: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model: transformers.PreTrainedModel = decoders[type(config)](config)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (center if is_norm else 0.0))
    return model


def save_random(kind: str, folder: Path, **more: Any) -> transformers.PreTrainedModel:
    """The model, written into a folder as transformers writes it."""
    transformers.utils.logging.disable_progress_bar()
    model = random_model(kind, **more)
    model.save_pretrained(folder)
    return model
