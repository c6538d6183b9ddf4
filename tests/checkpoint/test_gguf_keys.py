"""Numeric keys of a GGUF file: each is honoured, as logits show, or the file is refused by a sentence that names key and value."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from aioengine.errors import ModelError
from aioengine.models.info import read_model_info, resolve_model
from tests.checkpoint.test_gguf import write_gguf
from tests.models.support import Case, assert_same, cases, load_ours, logits_of, random_model, reference_logits, some_tokens

Extra = Callable[[gguf.GGUFWriter], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AIOENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Keys under the architecture's prefix, in place of what the writer has there."""
    for key, value in keys.items():
        name = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{writer.arch}.{key}"
        for data in writer.kv_data:
            data.pop(name, None)
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_int32(name, value) if value < 0 else writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)


def write(path: Path, keys: Mapping[str, Any], *, case: str = "llama", architecture: str = "llama", more: Extra | None = None) -> Path:
    def extra(writer: gguf.GGUFWriter) -> None:
        put(writer, keys)
        if more is not None:
            more(writer)

    return write_gguf(random_model(cases()[case]), path / "m.gguf", architecture, extra=extra)


def our_logits(path: Path) -> torch.Tensor:
    return logits_of(load_ours(resolve_model(str(path))), some_tokens())


# ------------------------------------------------------------------------------------------------------------ rope
DIM, CONTEXT = 16, 128


def ggml_rotation(
    *, theta: float = 10000.0, factor: float = 1.0, yarn: bool = False, trained: int = CONTEXT, fast: float = 32.0, slow: float = 1.0
) -> tuple[np.ndarray[Any, Any], float]:
    """ggml's angles a position and factor on cosines and sines (ggml_rope_cache_init, llama_context), in float64 by hand."""
    plain = theta ** (-2.0 * np.arange(DIM // 2) / DIM)
    if not yarn:
        return plain / factor, 1.0

    def dimension(rotations: float) -> float:
        return DIM * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(0.0, math.floor(dimension(fast))), min(DIM - 1.0, math.ceil(dimension(slow)))
    ramp = 1 - np.clip((np.arange(DIM // 2) - low) / max(0.001, high - low), 0, 1)
    return plain / factor * (1 - ramp) + plain * ramp, 1 + 0.1 * math.log(factor) if factor > 1 else 1.0


def reference_with_rotation(model: transformers.PreTrainedModel, inverse: np.ndarray[Any, Any], magnitude: float) -> torch.Tensor:
    """transformers' logits with these angles and this factor in its rotary embedding."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.tensor(inverse, dtype=torch.float32)
    rotary.original_inv_freq = rotary.inv_freq
    rotary.attention_scaling = magnitude
    return reference_logits(model, some_tokens())


LINEAR = ggml_rotation(factor=4.0)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
ROPE: dict[str, tuple[dict[str, Any], tuple[np.ndarray[Any, Any], float]]] = {
    "scale_linear": ({"rope.scale_linear": 4.0}, LINEAR),
    "factor without a type": ({"rope.scaling.factor": 4.0}, LINEAR),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LINEAR),
    "the new key before the old": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 9.0}, LINEAR),
    "linear without a factor": ({"rope.scaling.type": "linear"}, ggml_rotation()),
    "factor 0 is none": ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, ggml_rotation()),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ggml_rotation()),
    "finetuned": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.finetuned": True}, LINEAR),
    "freq_base": ({"rope.freq_base": 500000.0}, ggml_rotation(theta=500000.0)),
    "freq_base and linear": ({"rope.freq_base": 500.0, "rope.scale_linear": 3.0}, ggml_rotation(theta=500.0, factor=3.0)),
    "attn_factor": ({"rope.scaling.attn_factor": 1.5}, (ggml_rotation()[0], 1.5)),
    "attn_factor and linear": ({"rope.scaling.attn_factor": 1.5, "rope.scale_linear": 4.0}, (LINEAR[0], 1.5)),
    "yarn": (YARN, ggml_rotation(factor=4.0, yarn=True, trained=32)),
    "yarn of the whole context": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
        ggml_rotation(factor=2.0, yarn=True),
    ),
    "yarn without a factor": ({"rope.scaling.type": "yarn"}, ggml_rotation()),
    "yarn with betas": (
        {**YARN, "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0},
        ggml_rotation(factor=4.0, yarn=True, trained=32, fast=8.0, slow=2.0),
    ),
    "yarn with its own ext_factor": ({**YARN, "rope.scaling.yarn_ext_factor": 1.0}, ggml_rotation(factor=4.0, yarn=True, trained=32)),
    "yarn and attn_factor": (
        {**YARN, "rope.scaling.attn_factor": 0.8},
        (ggml_rotation(factor=4.0, yarn=True, trained=32)[0], 0.8 * (1 + 0.1 * math.log(4.0))),
    ),
    "dimension_count": ({"rope.dimension_count": DIM}, ggml_rotation()),
}


@pytest.mark.parametrize("what", ROPE)
def test_every_rope_key_turns_queries_and_keys_as_ggml_does(what: str, tmp_path: Path) -> None:
    keys, (inverse, magnitude) = ROPE[what]
    expected = reference_with_rotation(random_model(cases()["llama"]), inverse, magnitude)
    assert_same(our_logits(write(tmp_path, keys)), expected)


@pytest.mark.parametrize("keys", [{}, {"rope.scale_linear": 2.0}, YARN], ids=["plain", "linear", "yarn"])
def test_frequency_factors_go_with_every_scaling(keys: Mapping[str, Any], tmp_path: Path) -> None:
    factors = np.linspace(1.0, 5.0, DIM // 2, dtype=np.float32)
    path = write(tmp_path, keys, more=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    inverse, magnitude = ggml_rotation(factor=float(keys.get("rope.scale_linear", 1.0)))
    if keys == YARN:
        inverse, magnitude = ggml_rotation(factor=4.0, yarn=True, trained=32)
    assert_same(our_logits(path), reference_with_rotation(random_model(cases()["llama"]), inverse / factors, magnitude))


# ------------------------------------------------------------------------------------------------- what is refused
REFUSED: dict[str, Any] = {
    "rope.scaling.type": "longrope",
    "rope.dimension_count": 8,
    "rope.dimension_sections": [4, 2, 2, 0],
    "rope.scaling.factor": -4.0,
    "rope.freq_base": 0.0,
    "rope.freq_base_swa": 1e6,
    "rope.scaling.alpha": 1000.0,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "attention.key_length": 0.5,
    "attention.value_length": 8,
    "attention.key_length_swa": 8,
    "attention.scale": 0.5,
    "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0,
    "attention.causal": False,
    "attention.temperature_scale": 0.1,
    "attention.temperature_length": 8192,
    "attention.output_scale": 2.0,
    "attention.value_scale": 0.5,
    "attention.rope_pattern": [1, 0, 1],
    "attention.layer_norm_rms_epsilon": float("nan"),
    "attention.head_count": [4, 4, 2],
    "attention.head_count_kv": [2, 2, 4],
    "attention.q_lora_rank": 16,
    "feed_forward_length": [112, 112, 64],
    "block_count": 0,
    "context_length": "long",
    "embedding_length_out": 32,
    "logit_scale": 0.0625,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "hidden_activation": "gelu",
    "use_parallel_residual": True,
    "tensor_data_layout": "jploski",
    "nextn_predict_layers": 1,
    "expert_used_count": 2,
    "leading_dense_block_count": 1,
    "swiglu_clamp_exp": [0.0, 7.0, 0.0],
    "something_new": 3,
    "something_new.at_all": "yes",
    "general.type": "adapter",
    "split.count": 3,
    "split.no": 1,
    "split.tensors.count": 7,
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_would_change_the_model_is_refused_by_name_and_value(key: str, tmp_path: Path) -> None:
    value = REFUSED[key]
    path = write(tmp_path, {key: value})
    with pytest.raises(ModelError) as caught:
        resolve_model(str(path))
    message = str(caught.value)
    assert key in message
    assert (f"{value:g}" if isinstance(value, float) else str(value)) in message
    assert "\n" not in message


YARN_REFUSED = {"rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_attn_factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1}


@pytest.mark.parametrize("key", YARN_REFUSED)
def test_yarn_keys_that_are_not_honoured_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{key}.*got {YARN_REFUSED[key]:g}"):
        resolve_model(str(write(tmp_path, {**YARN, key: YARN_REFUSED[key]})))


NEUTRAL: dict[str, Any] = {
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.freq_base_swa": 10000.0,
    "attention.value_length": 16,
    "attention.key_length_swa": 16,
    "attention.scale": 0.25,
    "attention.clamp_kqv": 0.0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.rope_pattern": 1,
    "feed_forward_length": [112, 112, 112],
    "attention.head_count": [4, 4, 4],
    "attention.head_count_kv": [2, 2, 2],
    "embedding_length_out": 64,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_norm": False,
    "logit_scale": 1.0,
    "embedding_scale": 0.0,
    "residual_scale": 1.0,
    "hidden_activation": "silu",
    "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",
    "pooling_type": 3,
    "decoder_start_token_id": -1,
    "swiglu_clamp_exp": [0.0, 0.0, 0.0],
    "general.type": "model",
    "split.count": 1,
    "split.no": 0,
}


def test_keys_that_say_what_is_so_anyway_change_nothing(tmp_path: Path) -> None:
    """All at once; `attention.head_count` for each layer also decides how rows are put back in order."""
    assert_same(our_logits(write(tmp_path, NEUTRAL)), reference_logits(random_model(cases()["llama"]), some_tokens()))


def test_the_numbers_that_llama_cpp_writes_down_without_use_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """`llama_model_saver` writes every number it knows."""
    dumped = {
        "time_mix_extra_dim": 0,
        "attn_logit_softcapping": 50.0,
        "router_logit_softcapping": 30.0,
        "final_logit_softcapping": 30.0,
        "expert_group_scale": 0.05,
        "token_shift_count": 2,
    }
    assert_same(our_logits(write(tmp_path, dumped)), reference_logits(random_model(cases()["llama"]), some_tokens()))
    with pytest.raises(ModelError, match=r"final_logit_softcapping .* got 15"):
        resolve_model(str(write(tmp_path, {**dumped, "final_logit_softcapping": 15.0})))


@pytest.mark.parametrize(("architecture", "case"), [("llama", "mistral-window"), ("qwen2", "qwen2-window")])
def test_a_sliding_window_is_honoured(architecture: str, case: str, tmp_path: Path) -> None:
    model = random_model(cases()[case])
    window = {"attention.sliding_window": model.config.sliding_window}
    path = write_gguf(model, tmp_path / "m.gguf", architecture, extra=lambda writer: put(writer, window))
    files = resolve_model(str(path))
    assert read_model_info(files).sliding_window == model.config.sliding_window
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


GEMMA3_KEYS: dict[str, Any] = {"attention.sliding_window": 128, "attention.sliding_window_pattern": [True, True, False, True]}


def gemma3_case(**changes: Any) -> Case:
    """As GGUF can state it: scores are scaled by the size of a head."""
    case = cases()["gemma3"]
    return replace(case, config=transformers.Gemma3TextConfig(**{**case.config.to_dict(), "query_pre_attn_scalar": 32, **changes}))


def write_gemma3(path: Path, case: Case, keys: Mapping[str, Any]) -> Path:
    return write_gguf(random_model(case), path / "m.gguf", "gemma3", extra=lambda writer: put(writer, keys))


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, {}),
        ({"attention.sliding_window": 7}, {}),
        ({"rope.freq_base_swa": 500.0}, {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
        ),
    ],
)
def test_gemma3_is_read_as_llama_cpp_writes_it(keys: Mapping[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    """Names and norms; the kinds of layers say their angles, and scaling is for those that see everything."""
    ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 1e6), ("sliding_attention", 1e4))}
    case = gemma3_case(rope_parameters={**ropes, **changes}, sliding_window=keys.get("attention.sliding_window", 128))
    ours = load_ours(resolve_model(str(write_gemma3(tmp_path, case, {**GEMMA3_KEYS, **keys}))))
    assert_same(logits_of(ours, some_tokens()), reference_logits(random_model(case), some_tokens()))


@pytest.mark.parametrize(("pattern", "full"), [({}, [5]), ({"attention.sliding_window_pattern": 3}, [2, 5])])
def test_gemma3_kinds_of_layers_by_a_period(pattern: Mapping[str, Any], full: list[int], tmp_path: Path) -> None:
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(7)]
    case = gemma3_case(num_hidden_layers=7, layer_types=kinds)
    files = resolve_model(str(write_gemma3(tmp_path, case, {"attention.sliding_window": 128, **pattern})))
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(random_model(case), some_tokens()))


def test_gemma3_without_a_window_has_one_kind_of_angles(tmp_path: Path) -> None:
    """llama.cpp's reading of a file from before it knew the windows."""
    case = gemma3_case(layer_types=["full_attention"] * 4)
    files = resolve_model(str(write_gemma3(tmp_path, case, {})))
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(random_model(case), some_tokens()))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"attention.sliding_window_pattern": [True, False]},
            r"sliding_window_pattern must be a positive number or 4 flags, got \[True, False\]",
        ),
        ({"attention.sliding_window_pattern": -1}, r"sliding_window_pattern must be a positive number or 4 flags, got \[-1\]"),
        ({"final_logit_softcapping": 30.0}, r"gemma3\.final_logit_softcapping .* got 30"),
        ({"attn_logit_softcapping": 50.0}, r"gemma3\.attn_logit_softcapping .* got 50"),
        ({"attention.scale": 0.5}, r"gemma3\.attention\.scale must be 1/sqrt\(32\), got 0\.5"),
    ],
)
def test_gemma3_keys_that_change_the_result_are_refused(keys: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(write_gemma3(tmp_path, gemma3_case(), {**GEMMA3_KEYS, **keys})))


def test_a_window_of_some_layers_is_refused(tmp_path: Path) -> None:
    keys = {"attention.sliding_window": 7, "attention.sliding_window_pattern": 2}
    with pytest.raises(ModelError, match=r"sliding_window_pattern must be 1.*got 2"):
        resolve_model(str(write(tmp_path, keys)))


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "context_length", "feed_forward_length", "attention.head_count"])
def test_a_size_that_is_missing_is_named(key: str, tmp_path: Path) -> None:
    def without(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop(f"llama.{key}", None)

    with pytest.raises(ModelError, match=rf"llama\.{key} must be a positive number, got None"):
        resolve_model(str(write(tmp_path, {}, more=without)))


def test_the_embedding_says_how_many_tokens_there_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`vocab_size` disagrees: the rows are what can be looked up."""
    with caplog.at_level(logging.WARNING):
        assert read_model_info(resolve_model(str(write(tmp_path, {"vocab_size": 90})))).vocab_size == 96
    assert "llama.vocab_size is 90, the embedding has 96 rows" in caplog.text


# ---------------------------------------------------------------------------------------------------------- biases
@pytest.mark.parametrize("left_out", ["q", "k", "v", "o", "qo", "kvo", "qkv"])
def test_every_bias_of_attention_is_optional(left_out: str, tmp_path: Path) -> None:
    case = cases()["llama-bias"]
    check_biases(case.config.mlp_bias, [f"self_attn.{part}_proj.bias" for part in left_out], tmp_path)


@pytest.mark.parametrize("left_out", ["gate", "up", "down", "gate up"])
def test_every_bias_of_the_mlp_is_optional(left_out: str, tmp_path: Path) -> None:
    check_biases(True, [f"mlp.{part}_proj.bias" for part in left_out.split()], tmp_path)


def check_biases(mlp: bool, left_out: list[str], tmp_path: Path) -> None:
    case = cases()["llama-bias"]
    case.config.mlp_bias = mlp
    case.config.num_key_value_heads = 2
    model = random_model(case)
    state = model.state_dict()
    gone = {name for name in state if name.endswith(tuple(left_out))}
    for name in gone:
        torch.nn.init.zeros_(state[name])
    expected = reference_logits(model, some_tokens())
    path = write_gguf(model, tmp_path / "m.gguf", "llama", leave_out=gone)
    assert_same(our_logits(path), expected)


def test_a_qwen2_without_a_bias_on_values_is_read(tmp_path: Path) -> None:
    model = random_model(cases()["qwen2"])
    gone = {name for name in model.state_dict() if name.endswith("v_proj.bias")}
    for name in gone:
        torch.nn.init.zeros_(model.state_dict()[name])
    path = write_gguf(model, tmp_path / "m.gguf", "qwen2", leave_out=gone)
    assert_same(our_logits(path), reference_logits(model, some_tokens()))


def test_more_heads_than_numbers_are_refused(tmp_path: Path) -> None:
    """The head size would be 0."""

    def without(writer: gguf.GGUFWriter) -> None:
        for data in writer.kv_data:
            data.pop("llama.attention.key_length", None)

    keys = {"attention.head_count": 65, "attention.head_count_kv": 65, "attention.scale": 0.25}
    with pytest.raises(ModelError, match=r"attention\.head_count must be at most embedding_length \(64\), got 65"):
        resolve_model(str(write(tmp_path, keys, more=without)))
