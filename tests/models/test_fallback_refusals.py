"""What transformers' own code would get wrong over a paged cache is refused: one line with the architecture and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioengine.attention.base import AttentionConfig
from aioengine.attention.registry import select_attention_backend
from aioengine.checkpoint.files import ModelFiles
from aioengine.checkpoint.safetensors import find_safetensors
from aioengine.errors import ModelError
from aioengine.models.base import CausalLM
from aioengine.models.fallback.config import read_transformers_config
from aioengine.models.info import read_model_info, resolve_model
from aioengine.models.loader import load_model
from tests.models.fallback_cases import save_random

CPU = torch.device("cpu")


def raw(kind: str, architecture: str | None = None, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **({} if architecture is None else {"architectures": [architecture]}), **more}


BY_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "a state": (raw("mamba", "MambaForCausalLM"), "'MambaForCausalLM' is not supported.*keeps a state other than keys and values"),
    "a state beside attention": (raw("jamba", "JambaForCausalLM"), "'JambaForCausalLM'.*keeps a state"),
    "convolutions": (
        raw("lfm2", "Lfm2ForCausalLM", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "'Lfm2ForCausalLM'.*layers of type conv",
    ),
    "sinks": (raw("gpt_oss", "GptOssForCausalLM"), "'GptOssForCausalLM'.*its attention has sinks"),
    "alibi": (raw("bloom", "BloomForCausalLM"), "'BloomForCausalLM'.*ALiBi"),
    "alibi, mpt": (raw("mpt", "MptForCausalLM"), "'MptForCausalLM'.*ALiBi"),
    "alibi by a key": (raw("falcon", "FalconForCausalLM", alibi=True), "'FalconForCausalLM'.*alibi is true"),
    "attention of its own": (raw("falcon", "FalconForCausalLM"), "'FalconForCausalLM'.*computes attention by itself"),
    "an encoder and a decoder": (raw("t5", "T5ForConditionalGeneration"), "'T5ForConditionalGeneration'.*no decoder of model_type 't5'"),
    "a decoder with an encoder": (raw("bart", "BartForCausalLM", is_encoder_decoder=True), "is_encoder_decoder is true"),
    "an encoder": (
        raw("bert", "BertForMaskedLM"),
        "'BertForMaskedLM' is not supported: the decoder of model_type 'bert' is BertLMHeadModel",
    ),
    "an encoder that says it decodes": (raw("bert", "BertLMHeadModel"), "is_decoder is false"),
    "chunks": (raw("llama4_text", "Llama4ForCausalLM"), "layers of type chunked_attention"),
    "an index": (raw("deepseek_v32", "DeepseekV32ForCausalLM"), "indexed_attention"),
    "cross attention": (raw("mllama", "MllamaForConditionalGeneration"), "MllamaForConditionalGeneration"),
    "heads that differ": (raw("gemma4_text", "Gemma4ForCausalLM"), "'Gemma4ForCausalLM'.*head_dim"),
    "code of a repository": (
        raw("weird", "WeirdForCausalLM", auto_map={"AutoModelForCausalLM": "modeling_weird.WeirdForCausalLM"}),
        r"'WeirdForCausalLM' \(model_type 'weird'\) is not supported: it has no class here, and transformers has none",
    ),
    "no type": ({"architectures": ["WeirdForCausalLM"]}, r"'WeirdForCausalLM' \(model_type None\)"),
    "a classifier": (raw("gemma2", "Gemma2ForSequenceClassification"), "the decoder of model_type 'gemma2' is Gemma2ForCausalLM"),
    "layers of no number": (raw("phi3", num_hidden_layers=-3), "num_hidden_layers"),
    "layer_types of another length": (raw("cohere2", layer_types=["full_attention"] * 2, num_hidden_layers=3), "layer_types|layers"),
    "a window of 0": (raw("phi3", sliding_window=0), "sliding_window must be a positive integer, got 0"),
    "heads that do not fit": (raw("gemma2", num_attention_heads=5, num_key_value_heads=2, head_dim=16, hidden_size=80), "do not fit"),
    "a config that its class refuses": (raw("phi3", rope_scaling={"type": "longrope"}), "config.json: "),
}


@pytest.mark.parametrize("what", BY_CONFIG)
def test_by_config_alone_before_weights_are_there(what: str, tmp_path: Path) -> None:
    config, message = BY_CONFIG[what]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message) as failure:
        resolve_model(str(tmp_path))
    assert len(str(failure.value).splitlines()) == 1


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    """Not even where the type is one that transformers has."""
    save_random("gemma2", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config["_attn_implementation"] = "someone/kernel"
    config["attn_implementation"] = "someone/kernel"
    path.write_text(json.dumps(config))
    marker = tmp_path / "was_here"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    load(tmp_path)
    assert not marker.exists()


def load(folder: Path) -> CausalLM:
    files = ModelFiles(name=str(folder), folder=folder, weights=find_safetensors(folder), format="safetensors")
    info = read_model_info(files)
    config = AttentionConfig(
        num_heads=info.num_heads,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=16,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
    )
    backend = select_attention_backend("torch_paged", config, CPU)
    return load_model(files, info=info, device=CPU, dtype=torch.float32, attention_backend=backend)


BY_LOADING: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks that nobody announced": ("granite_swa", {}, "'GraniteSWAForCausalLM'.*its attention has sinks"),
    "two attentions a layer": ("diffllama", {}, "layer 0 attends more than once a step"),
    "arguments that are dropped": ("nemotron", {}, "does not hand arguments of a call down to attention"),
    "layers of other shapes": (
        "jetmoe",
        {"num_key_value_heads": 4},
        "layer 0 has 8 query and 8 key/value heads of 128.*all layers must be alike",
    ),
}


@pytest.mark.parametrize("what", BY_LOADING)
def test_by_what_its_layers_ask_of_attention(what: str, tmp_path: Path) -> None:
    kind, more, message = BY_LOADING[what]
    save_random(kind, tmp_path, **more)
    with pytest.raises(ModelError, match=message) as failure:
        load(tmp_path)
    assert len(str(failure.value).splitlines()) == 1


CODE: dict[str, tuple[Callable[[Any], object], str]] = {
    "positions it makes up itself": (
        lambda module: patch_forward(module.Gemma2Model, lambda kw: kw.update(position_ids=torch.arange(kw["input_ids"].shape[1])[None])),
        "in a dry run its logits differ from those of transformers' eager attention by .* of their range, more than 1e-04",
    ),
    "tokens that see each other outside attention": (
        lambda module: mix_tokens(module.Gemma2MLP),
        "in a dry run its logits differ",
    ),
    "a window that config.json does not have": (
        lambda module: narrow_masks(module),
        "a query of layer 0 at position 8 does not see position 0; config.json implies a window of 9",
    ),
}


def patch_forward(owner: Any, change: Callable[[dict[str, Any]], object]) -> None:
    original = owner.forward

    def forward(self: Any, **kwargs: Any) -> Any:
        change(kwargs)
        return original(self, **kwargs)

    owner.forward = forward


def mix_tokens(owner: Any) -> None:
    original = owner.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = original(self, x) + x.roll(1, dims=1)
        return mixed

    owner.forward = forward


def narrow_masks(module: Any) -> None:
    original = module.create_sliding_window_causal_mask

    def create(config: Any, **kwargs: Any) -> Any:
        narrow = type(config)(**{**config.to_dict(), "sliding_window": 8})
        narrow._attn_implementation = config._attn_implementation
        return original(narrow, **kwargs)

    module.create_sliding_window_causal_mask = create


@pytest.mark.parametrize("what", CODE)
def test_by_what_its_code_computes(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a later transformers computed something else."""
    from transformers.models.gemma2 import modeling_gemma2 as module

    for owner, name in ((module.Gemma2Model, "forward"), (module.Gemma2MLP, "forward"), (module, "create_sliding_window_causal_mask")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    change, message = CODE[what]
    save_random("gemma2", tmp_path)
    load(tmp_path)
    change(module)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "the checkpoint lacks model.layers.1.mlp.up_proj.weight"),
    "of another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(63)}),
        r"tensor model.norm.weight has shape \[63\], config.json implies \[64\]",
    ),
    "too many": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "has no use for .*q_proj.bias of the checkpoint",
    ),
    "quantized": (lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(4)}), "qweight is part of quantized weights"),
    "integers": (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.int8)}), "stored as I8; supported"),
    "fewer layers": (
        lambda t: [t.pop(name) for name in list(t) if ".layers.3." in name],
        "num_hidden_layers is 4, .* has tensors of 3 layers",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_by_its_tensors(what: str, tmp_path: Path) -> None:
    edit, message = TENSORS[what]
    save_random("gemma2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message) as failure:
        load(tmp_path)
    assert len(str(failure.value).splitlines()) == 1


def test_a_config_that_asks_for_more_memory_than_the_files_hold(tmp_path: Path) -> None:
    save_random("gemma2", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1 << 23}))
    with pytest.raises(ModelError, match=r"config.json implies \d+ weights, the checkpoint has \d+"):
        load(tmp_path)


def test_a_rotation_that_changes_with_the_length_of_a_text_limits_it() -> None:
    """Phi-3's angles are others once a text is longer than 4096 tokens: those of keys that are cached would be wrong."""
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config: dict[str, Any] = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": factors}
    assert read_transformers_config(raw("phi3", **config)).max_position_embeddings == 4096
    assert read_transformers_config(raw("phi3", max_position_embeddings=4096)).max_position_embeddings == 4096
