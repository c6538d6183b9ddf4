"""Weights and configs from anybody that do not fit together, or make no sense: a model or a ModelError that names the value."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from safetensors.torch import save_file

from aioengine.errors import ModelError
from tests.models.untrusted import (
    CONFIG,
    DIM,
    FUZZ,
    HEADS,
    HIDDEN,
    JSON,
    KV_HEADS,
    MODES,
    SIZE,
    VOCAB,
    Weights,
    bounded,
    damages,
    load,
    model_or_error,
    tensors,
    write_config,
    write_gguf,
)


@pytest.mark.parametrize("weights", MODES)
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_the_undamaged_files_load(format: str, weights: Weights, scratch: Path) -> None:
    load(scratch / format, weights)


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
    "another activation": ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported: gelu"),
    "architecture": ({"architectures": [["LlamaForCausalLM"]]}, "names no architecture"),
    "eos a fraction": ({"eos_token_id": [1.5]}, r"eos_token_id must be a token id or a list of them, got \[1.5\]"),
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
