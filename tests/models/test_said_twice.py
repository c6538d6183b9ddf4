"""What a checkpoint states in two places: the two disagreeing, what counts is what transformers 5 takes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from aioengine import AsyncEngine, SamplingParams
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.safetensors import INDEX_NAME
from aioengine.errors import ModelError
from aioengine.layers.rope import inverse_frequencies
from aioengine.models.config import DecoderConfig
from aioengine.models.info import read_model_info, resolve_model
from aioengine.models.registry import architecture_of, find_model_class
from aioengine.testing.tokens import FakeTokenizer
from tests.models.support import (
    VOCAB,
    assert_same,
    cases,
    load_ours,
    load_reference,
    logits_of,
    random_model,
    reference_logits,
    save,
    some_tokens,
)

logging.getLogger("transformers").setLevel(logging.ERROR)

ABSENT = object()
Tensors = dict[str, torch.Tensor]


def edit_json(path: Path, changes: dict[str, Any]) -> None:
    content = {**json.loads(path.read_text()), **changes} if path.is_file() else changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ABSENT}))


def checkpoint(folder: Path, case: str, *, changes: dict[str, Any] | None = None, edit: Callable[[Tensors], Any] | None = None) -> Path:
    """A random tiny model whose config.json or tensors then say something else."""
    files = save(random_model(cases()[case]), folder)
    if edit is not None:
        tensors = load_file(files.weights[0])
        edit(tensors)
        save_file(tensors, files.weights[0], metadata={"format": "pt"})
    edit_json(folder / "config.json", changes or {})
    return folder


def resolved(folder: Path) -> ModelFiles:
    return resolve_model(str(folder))


def assert_as_transformers(folder: Path) -> None:
    """The same logits from the folder, all tokens at once and one after the other."""
    expected = reference_logits(load_reference(folder), some_tokens())
    assert expected.abs().max() > 1
    ours = load_ours(resolved(folder))
    assert_same(logits_of(ours, some_tokens()), expected)
    assert_same(logits_of(ours, some_tokens(), chunks=(20, *[1] * 21)), expected)


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(3)) * 0.3


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"type": "linear", "factor": 3.0}
CHANGED: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Any] | None]] = {
    "head: tied, but another one is stored": ("llama-tied", {}, other_head),
    "head: tied, and the same is stored": (
        "llama-tied",
        {},
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    ),
    "head: tied, and only the head is stored": (
        "llama-tied",
        {},
        lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}),
    ),
    "head: qwen, tied, but another one is stored": ("qwen2-tied", {}, other_head),
    "head: not tied, but the stored one is the embedding": (
        "llama",
        {},
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    ),
    "head: the key is absent": ("llama", {"tie_word_embeddings": ABSENT}, None),
    "rope_scaling beside rope_parameters": ("llama", {"rope_scaling": YARN}, None),
    "rope_scaling beside rope_parameters of another theta": (
        "llama",
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        None,
    ),
    "rope_scaling beside scaled rope_parameters": ("llama3-rope", {"rope_scaling": LINEAR, "rope_theta": 500000.0}, None),
    "rope_scaling with a theta of its own": ("qwen3", {"rope_scaling": {**LINEAR, "rope_theta": 300.0}, "rope_theta": 1e6}, None),
    "rope_scaling, rope_theta beside it": ("qwen2", {"rope_scaling": LINEAR, "rope_theta": 1e6}, None),
    "rope_scaling null": ("llama3-rope", {"rope_scaling": None}, None),
    "rope_scaling empty": ("llama3-rope", {"rope_scaling": {}}, None),
    "rope_theta beside rope_parameters": ("llama-tied", {"rope_theta": 77.0}, None),
    "rope_theta alone": ("llama", {"rope_parameters": ABSENT, "rope_theta": 77.0}, None),
    "no rope settings": ("llama-tied", {"rope_parameters": ABSENT}, None),
    "rope_type against type": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
        None,
    ),
    "trained length in two places": ("llama3-rope", {"original_max_position_embeddings": 16}, None),
    "trained length of yarn in two places": ("llama-yarn", {"original_max_position_embeddings": 64}, None),
    "trained length left out": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None),
    "mistral: null window": ("mistral-window", {"sliding_window": None}, None),
    "mistral: window against layer_types": ("mistral-window", {"layer_types": ["full_attention"] * 3}, None),
    "llama: a window that it does not have": ("llama", {"sliding_window": 5, "use_sliding_window": True}, None),
    "qwen: window switched off": ("qwen2-window", {"use_sliding_window": False, "layer_types": ABSENT}, None),
    "qwen: window of no tokens": ("qwen2-window", {"sliding_window": None, "layer_types": ABSENT}, None),
    "qwen: from a layer that is not there": ("qwen2-window", {"max_window_layers": 28, "layer_types": ABSENT}, None),
    "qwen: layer_types against max_window_layers": (
        "qwen2-window",
        {"max_window_layers": 28, "layer_types": ["sliding_attention"] * 3},
        None,
    ),
    "qwen: from a layer before the first": ("qwen2-window", {"max_window_layers": -1, "layer_types": ABSENT}, None),
    "qwen: layer_types under a name of old": ("qwen2-window", {"layer_types": ["attention"] * 3}, None),
    "qwen: layer_types against max_window_layers, on some layers": (
        "qwen2-mixed",
        {"max_window_layers": 2, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        None,
    ),
    "mistral: layer_types, as before there was a ministral": (
        "mistral-window",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        None,
    ),
    "qwen: layer_types full, window on": ("qwen2-window", {"layer_types": ["full_attention"] * 3}, None),
    "qwen: a window longer than any text, on some layers": (
        "qwen2-window",
        {"sliding_window": 128, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        None,
    ),
    "key/value heads null": ("llama-bias", {"num_key_value_heads": None}, None),
    "head_dim null": ("llama", {"head_dim": None}, None),
    "head_dim absent": ("llama", {"head_dim": ABSENT}, None),
    "head_dim that is not hidden_size / heads": ("llama-head-dim", {"num_key_value_heads": 2}, None),
    "architectures against model_type": ("llama", {"architectures": ["Qwen3ForCausalLM"]}, None),
    "architectures against model_type, a mistral": ("mistral-window", {"architectures": ["LlamaForCausalLM"]}, None),
    "architectures, two of them": ("llama", {"architectures": ["SomethingElse", "LlamaForCausalLM"]}, None),
    "architectures absent": ("qwen3", {"architectures": ABSENT}, None),
    "architectures empty": ("llama", {"architectures": []}, None),
    "architectures of the part without a head": ("llama", {"architectures": ["LlamaModel"]}, None),
    "model_type alone beside another spelling": ("llama", {"architectures": ["LLaMAForCausalLM"]}, None),
    "fewer layers used than stored": ("llama", {"num_hidden_layers": 2}, None),
    "no prefix": ("llama", {}, lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)]),
    "a bias of two left out": ("llama-bias", {}, lambda t: [t.pop(name) for name in list(t) if name.endswith("o_proj.bias")]),
    "a bias that no tensor has": ("qwen3", {"attention_bias": True}, None),
    "all biases left out": ("llama-bias", {}, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias")]),
    "rotary frequencies stored": ("llama", {}, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})),
    "a value head beside": (
        "llama",
        {},
        lambda t: t.update({"v_head.summary.weight": torch.ones(1, 64), "score.weight": torch.ones(2, 64)}),
    ),
    "pretraining_tp": ("llama", {"pretraining_tp": 2}, None),
    "dtype against torch_dtype": ("llama", {"dtype": "float32", "torch_dtype": "float16"}, None),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_disagrees_gives_the_logits_of_transformers(what: str, tmp_path: Path) -> None:
    case, changes, edit = CHANGED[what]
    assert_as_transformers(checkpoint(tmp_path, case, changes=changes, edit=edit))


@pytest.mark.parametrize(
    "what",
    [
        "head: tied, but another one is stored",
        "head: tied, and only the head is stored",
        "rope_scaling beside rope_parameters",
        "mistral: window against layer_types",
        "fewer layers used than stored",
        "no prefix",
        "a bias of two left out",
    ],
)
@pytest.mark.parametrize("weights", ["auto", "dense"])
async def test_the_engine_generates_what_transformers_generates(what: str, weights: Any, tmp_path: Path) -> None:
    case, changes, edit = CHANGED[what]
    checkpoint(tmp_path, case, changes=changes, edit=edit)
    theirs: Any = load_reference(tmp_path)
    prompt = some_tokens(12)
    expected = theirs.generate(prompt[None], do_sample=False, max_new_tokens=25, eos_token_id=None)[0, 12:].tolist()
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    async with AsyncEngine(str(tmp_path), tokenizer=FakeTokenizer(), weights=weights, num_threads=torch.get_num_threads()) as engine:
        (output,) = await engine.generate_batch([prompt.tolist()], params)
    assert list(output.token_ids) == expected


@pytest.mark.parametrize(
    ("what", "warning"),
    [
        ("head: tied, but another one is stored", "tie_word_embeddings: true, but lm_head.weight and model.embed_tokens.weight"),
        ("rope_scaling beside rope_parameters of another theta", "rope_theta 500000.0 stands in rope_parameters, .* it is 10000.0"),
        ("rope_scaling beside scaled rope_parameters", "rope_scaling replaces rope_parameters as a whole, which stated {.*'llama3'"),
        ("rope_theta beside rope_parameters", "rope_theta 77.0 does not count"),
        ("architectures against model_type", "architectures says Qwen3ForCausalLM, model_type llama: taken as LlamaForCausalLM"),
        ("fewer layers used than stored", r"num_hidden_layers 2\) has no use for model.layers.2."),
        ("a value head beside", "has no use for score.weight, v_head.summary.weight"),
        ("a bias of two left out", "lacks model.layers.0.self_attn.o_proj.bias.* taken as 0"),
        ("dtype against torch_dtype", "torch_dtype 'float16' does not count beside dtype 'float32'"),
    ],
)
def test_a_line_in_the_log_says_what_is_taken(what: str, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, changes, edit = CHANGED[what]
    load_ours(resolved(checkpoint(tmp_path, case, changes=changes, edit=edit)))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("aioengine")]
    assert [line for line in lines if re.search(warning, line)], lines


def test_what_agrees_is_not_worth_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for case in ("llama-tied", "mistral-window", "qwen2-window", "qwen3-tied"):
        load_ours(resolved(checkpoint(tmp_path / case, case)))
    for what in ("rope_scaling beside rope_parameters", "qwen: from a layer that is not there", "architectures absent"):
        case, changes, edit = CHANGED[what]
        load_ours(resolved(checkpoint(tmp_path / what, case, changes=changes, edit=edit)))
    assert not [record for record in caplog.records if record.name.startswith("aioengine")]


def test_a_tensor_in_two_shards_and_an_index_beside_a_whole_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last shard counts; model.safetensors counts before the index. So it is in transformers."""
    model = random_model(cases()["llama"])
    folder = tmp_path / "shards"
    files = save(model, folder, max_shard_size="60KB")
    last, name = files.weights[-1], "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(last)
    assert name not in tensors
    tensors[name] = torch.randn(112, 64) * 0.2
    save_file(tensors, last, metadata={"format": "pt"})
    assert_as_transformers(folder)
    assert "1 tensors lie in two files, model.layers.0.mlp.up_proj.weight for one" in caplog.text
    save(random_model(cases()["llama"]), tmp_path / "whole")
    assert not (tmp_path / "whole" / INDEX_NAME).exists()
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    save_file({name: tensor * 1.1 for name, tensor in whole.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(folder)


@pytest.mark.parametrize(
    ("changes", "stored", "expected"),
    [
        ({}, torch.bfloat16, "bfloat16"),
        ({"dtype": ABSENT}, torch.float16, "float16"),
        ({"dtype": ABSENT, "torch_dtype": "bfloat16"}, torch.float16, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, torch.float32, "float16"),
        ({"dtype": None, "torch_dtype": None}, torch.bfloat16, "bfloat16"),
    ],
)
def test_the_dtype_is_that_of_transformers(changes: dict[str, Any], stored: torch.dtype, expected: str, tmp_path: Path) -> None:
    model: Any = random_model(cases()["llama"])
    save(model.to(stored), tmp_path)
    edit_json(tmp_path / "config.json", changes)
    assert read_model_info(resolved(tmp_path)).dtype == expected
    assert str(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype) == f"torch.{expected}"


# ---------------------------------------------------------------------------------------------------- any combination
def optional(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([ABSENT, *values])


ROPE = optional(
    None,
    {},
    {"rope_type": "default"},
    {"rope_theta": 300.0},
    LINEAR,
    {**LINEAR, "rope_theta": 5e5},
    YARN,
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
)
CONFIGS = st.fixed_dictionaries(
    {
        "model_type": st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
        "rope_scaling": ROPE,
        "rope_parameters": ROPE,
        "rope_theta": optional(1e4, 5e5),
        "original_max_position_embeddings": optional(16, 64),
        "max_position_embeddings": st.sampled_from([64, 128]),
        "hidden_size": st.just(64),
        "num_attention_heads": st.sampled_from([2, 4]),
        "num_key_value_heads": optional(None, 2),
        "head_dim": optional(None, 16, 32),
        "num_hidden_layers": st.just(3),
        "tie_word_embeddings": optional(True, False),
        "use_sliding_window": optional(True, False),
        "sliding_window": optional(None, 7, 4096),
        "max_window_layers": optional(0, 2, 28),
        "layer_types": optional(
            None,
            ["full_attention"] * 3,
            ["sliding_attention"] * 3,
            ["full_attention", "sliding_attention", "full_attention"],
            ["full_attention"] * 2,
        ),
        "attention_bias": optional(True, False),
        "rms_norm_eps": optional(1e-5),
        "hidden_act": optional("gelu"),
    }
)


def windows_of_transformers(config: Any) -> list[int | None]:
    if config.model_type == "llama":
        return [None] * config.num_hidden_layers
    if config.model_type == "mistral":  # with layer_types it becomes a "ministral"
        return [config.sliding_window] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


@given(drawn=CONFIGS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_config_reads_as_in_transformers(drawn: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    raw = {key: value for key, value in drawn.items() if value is not ABSENT}
    folder = tmp_path_factory.mktemp("any-config")
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        theirs = transformers.AutoConfig.from_pretrained(folder)
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
        windows, expected = windows_of_transformers(theirs), rotary
    except Exception:  # they document none; what they refuse is nobody's truth
        return
    has_window = getattr(theirs, "sliding_window", None) is not None
    if not has_window and "sliding_attention" in (getattr(theirs, "layer_types", None) or []) and theirs.model_type != "llama":
        with pytest.raises(ModelError, match="layer_types"):  # transformers fails at the first token
            ours_of(raw)
        return
    try:
        ours = ours_of(raw)
    except ModelError as error:
        if not theirs.num_attention_heads % theirs.num_key_value_heads or "is not a multiple" not in str(error):
            raise
        return
    reached = [None if window is None or window >= ours.max_position_embeddings else window for window in windows]
    assert list(ours.layer_windows) == reached
    assert (ours.num_kv_heads, ours.tie_word_embeddings) == (theirs.num_key_value_heads, theirs.tie_word_embeddings)
    assert (ours.rms_norm_eps, ours.hidden_act, ours.vocab_size) == (theirs.rms_norm_eps, theirs.hidden_act, theirs.vocab_size)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    inverse, scale = inverse_frequencies(ours.rope, head_dim=ours.head_dim, max_positions=ours.max_position_embeddings)
    torch.testing.assert_close(inverse, expected.original_inv_freq)
    assert scale == pytest.approx(expected.attention_scaling)


def ours_of(raw: dict[str, Any]) -> DecoderConfig:
    return find_model_class(architecture_of(raw)).read_config(raw)
