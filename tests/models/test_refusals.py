"""What cannot be served is refused before weights are read: one line that names the key, the value and what would work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine.checkpoint import hub
from aioengine.checkpoint.safetensors import SafetensorsTensor
from aioengine.errors import ModelError
from aioengine.models.info import read_model_info, resolve_model
from tests.models.support import cases, load_ours, random_model, save

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save(random_model(cases()["llama"]), folder)
    save(random_model(cases()["qwen2-window"]), folder / "qwen")
    return folder


def copy(whole: Path, folder: Path, changes: dict[str, Any], *, case: str = "llama") -> Path:
    source = whole / "qwen" if case == "qwen2-window" else whole
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **changes}))
    return folder


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_into(self: SafetensorsTensor, out: torch.Tensor) -> None:
        raise AssertionError(f"{self.name} was read")

    monkeypatch.setattr(SafetensorsTensor, "read_into", read_into)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a quantization of no known method": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        "'mxfp4' are not supported; supported: gptq, awq",
    ),
    "compressed-tensors, once": (
        {"compression_config": {"quant_method": "compressed-tensors"}},
        "compression_config.*'compressed-tensors'.*use the model that was quantized, or a GGUF file of it",
    ),
    "a method of no name": ({"quantization_config": {"bits": 8}}, r"quant_method None \(8 bits\)"),
    "a quantization that is no object": ({"quantization_config": "gptq"}, "quantization_config must be an object, got 'gptq'"),
    "quantized, and of an unknown kind": ({"quantization_config": {"quant_method": "gptq"}, "architectures": ["X"]}, "'gptq'"),
    "another architecture": (
        {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"},
        "'StableLmForCausalLM' is not supported by transformers' own code.*computes attention by itself",
    ),
    "a classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification' is not supported"),
    "a reward model": ({"architectures": ["Qwen2ForRewardModel"], "model_type": "qwen2"}, "'Qwen2ForRewardModel' is not supported"),
    "an encoder and a decoder": ({"is_encoder_decoder": True}, "is_encoder_decoder is true: only models that are a decoder alone"),
    "t5": ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "'T5ForConditionalGeneration' is not supported"),
    "longrope": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        "rope_scaling: rope type 'longrope'.*supported: default, dynamic",
    ),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope' is not supported"),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        r"rope_parameters differs by the type of layer \(full_attention, sliding_attention\)",
    ),
    "part of a head turned": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5.*only 1.0 is",
    ),
    "part of a head turned, beside": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    "hidden_act": ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; supported: gelu, gelu_new"),
    "no key/value heads": ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
    "null where none may be": ({"rms_norm_eps": None}, "rms_norm_eps must be a number above 0.*, got None"),
}


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_served(what: str, whole: Path, tmp_path: Path) -> None:
    changes, message = CONFIGS[what]
    folder = copy(whole, tmp_path / "model", changes)
    with pytest.raises(ModelError, match=message) as failure:
        resolve_model(str(folder))
    assert str(folder) in str(failure.value)
    assert len(str(failure.value).splitlines()) == 1


WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries, num_hidden_layers is 3"),
    "a window of 0": ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    "a window of 0 on some layers": (
        {"sliding_window": 0, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "sliding_window must be a positive integer, got 0",
    ),
    "of a kind unknown": ({"layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention is not supported; full_attention and"),
    "too few": ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 2 entries, num_hidden_layers is 3"),
    "no window": ({"use_sliding_window": False}, "use_sliding_window is False, sliding_window is 9"),
    "null window": ({"sliding_window": None}, "use_sliding_window is True, sliding_window is None"),
}


@pytest.mark.usefixtures("no_reading")
@pytest.mark.parametrize("what", WINDOWS)
def test_windows_that_cannot_be_served(what: str, whole: Path, tmp_path: Path) -> None:
    changes, message = WINDOWS[what]
    folder = copy(whole, tmp_path / "model", changes, case="qwen2-window")
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def rename(old: str, new: str, *, dtype: torch.dtype | None = None) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        stored = tensors.pop(old)
        tensors[new] = stored if dtype is None else stored.to(dtype)

    return edit


TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "gptq, unsaid": (rename(f"{Q}.weight", f"{Q}.qweight", dtype=torch.int32), "q_proj.qweight is part of quantized weights.*GGUF"),
    "fp8 scales, unsaid": (lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(1)}), "weight_scale_inv is part of quantized weights"),
    "bitsandbytes, unsaid": (lambda t: t.update({f"{Q}.weight.absmax": torch.ones(1)}), "weight.absmax is part of quantized weights"),
    "compressed-tensors, unsaid": (rename(f"{Q}.weight", f"{Q}.weight_packed", dtype=torch.int32), "weight_packed is part of quantized"),
    "an adapter, unsaid": (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(8, 64)}), "lora_A.weight belongs to an adapter.*merge"),
    "names of another model": (
        lambda t: [t.update({f"transformer.{name}": t.pop(name)}) for name in list(t)],
        "no tensor of the checkpoint is that of a layer .*; there are transformer.lm_head.weight",
    ),
    "float8": (
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e4m3fn)}),
        "stored as F8_E4M3; supported: F64, F32, F16, BF16",
    ),
    "integers": (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.int8)}), "stored as I8; supported"),
    "a bias that config.json has not": (
        lambda t: t.update({f"{Q}.bias": torch.zeros(64)}),
        r"q_proj.bias.*no bias there \(keys attention_bias",
    ),
    "sinks": (lambda t: t.update({"model.layers.1.self_attn.sinks": torch.zeros(4)}), "self_attn.sinks of the checkpoint is none"),
    "no head": (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight; .*tie_word_embeddings: true"),
    "no head and no embedding": (
        lambda t: (t.pop("lm_head.weight"), t.pop("model.embed_tokens.weight")),
        "lacks model.embed_tokens.weight",
    ),
    "another vocabulary": (rename("lm_head.weight", "x"), "lacks lm_head.weight"),
    "more rows than vocab_size": (
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(97, 64)}),
        r"embed_tokens.weight has shape \[97, 64\], config.json implies \[96, 64\]",
    ),
    "Mistral's own names": (
        lambda t: [t.update({name.replace("self_attn.q_proj", "attention.wq"): t.pop(name)}) for name in list(t)],
        "lacks model.layers.0.self_attn.q_proj.weight",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_cannot_be_served(what: str, whole: Path, tmp_path: Path) -> None:
    edit, message = TENSORS[what]
    folder = copy(whole, tmp_path / "model", {})
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as failure:
        load_ours(resolve_model(str(folder)))
    assert str(folder) in str(failure.value)


def test_an_adapter_says_what_it_is(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta/base", "r": 8}
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}, folder / "adapter_model.safetensors")
    message = r"adapter \(adapter_config.json: peft_type 'LORA'\) of the model 'meta/base'.*load that model, or merge"
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))
    (folder / "config.json").write_text((whole / "config.json").read_text())  # trainers save it beside
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))
    copy(whole, folder, {})
    assert resolve_model(str(folder)).weights == (folder / "model.safetensors",)
    assert "the adapter is ignored" in caplog.text


def test_the_config_beside_a_gguf_file_is_not_asked(tmp_path: Path) -> None:
    """It belongs to the weights that were quantized; the GGUF file says everything itself."""
    (tmp_path / "config.json").write_text('{"model_type": "phi3", "quantization_config": {"quant_method": "gptq"}}')
    (tmp_path / "m.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"m\.gguf is not a GGUF file"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("small", "message"),
    [
        ({"config.json": {"quantization_config": {"quant_method": "gptq"}, "model_type": "llama"}}, "'gptq'"),
        ({"config.json": {"architectures": ["PhiForCausalLM"]}}, r"'PhiForCausalLM' \(model_type None\) is not supported"),
        ({"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "b"}}, "is an adapter"),
    ],
)
def test_a_repository_that_cannot_be_served_is_refused_before_its_weights_are_fetched(
    small: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    fetched: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        fetched.append(allow_patterns)
        for file, content in small.items():
            (tmp_path / file).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=message):
        resolve_model("some/repository")
    assert len(fetched) == 1
    assert not any(pattern.endswith(".safetensors") for pattern in fetched[0])


def test_a_repository_that_can_be_served_is_fetched_whole(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetched: list[list[str]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        fetched.append(allow_patterns)
        return str(whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    files = resolve_model("some/repository")
    assert read_model_info(files).name == "some/repository"
    assert "*.safetensors" in fetched[-1]
    assert set(hub._SMALL_FILES) == set(fetched[0]) < set(fetched[-1])
