"""Every family's logits equal transformers' on random tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine.config import EngineConfig
from aioengine.errors import ConfigError, ModelError
from aioengine.models.info import read_model_info
from tests.models.support import assert_same, cases, load_ours, load_reference, logits_of, random_model, reference_logits, save, some_tokens


@pytest.mark.parametrize("name", list(cases()))
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(cases()[name])
    expected = reference_logits(model, some_tokens())
    assert expected.abs().max() > 1  # else the comparison below would say little
    ours = load_ours(save(model, tmp_path))
    assert_same(logits_of(ours, some_tokens()), expected)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "qwen3-mixed", "gemma3-window"])
def test_chunks_give_the_logits_of_the_whole(name: str, tmp_path: Path) -> None:
    ours = load_ours(save(random_model(cases()[name]), tmp_path))
    whole = logits_of(ours, some_tokens())
    assert_same(logits_of(ours, some_tokens(), chunks=(1, 17, 2, 1, 20)), whole)


def test_sharded_checkpoint_equals_one_file(tmp_path: Path) -> None:
    model = random_model(cases()["llama"])
    files = save(model, tmp_path, max_shard_size="60KB")
    assert len(files.weights) > 2
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


def test_config_of_transformers_4_reads_the_same(tmp_path: Path) -> None:
    """Before version 5 the rotary settings lay in rope_theta and rope_scaling, and the dtype in torch_dtype."""
    model = random_model(cases()["llama3-rope"])
    files = save(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    assert read_model_info(files).dtype == "float32"
    assert_same(logits_of(load_ours(files), some_tokens()), reference_logits(model, some_tokens()))


def test_bfloat16_checkpoint_loads_as_float32_and_as_itself(tmp_path: Path) -> None:
    files = save(random_model(cases()["llama"]).bfloat16(), tmp_path)
    assert read_model_info(files).dtype == "bfloat16"
    expected = reference_logits(load_reference(tmp_path), some_tokens())
    assert_same(logits_of(load_ours(files), some_tokens()), expected)
    logits = logits_of(load_ours(files, dtype=torch.bfloat16), some_tokens()[:1])
    assert logits.dtype == torch.float32


def test_tied_head_shares_memory_and_ignores_a_repeated_tensor(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = random_model(cases()["llama-tied"])
    files = save(model, tmp_path)
    tensors = load_file(files.weights[0])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, files.weights[0], metadata={"format": "pt"})
    ours = load_ours(files)
    names = [name for name, _ in ours.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert_same(logits_of(ours, some_tokens()), reference_logits(model, some_tokens()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remove": "model.layers.1.self_attn.k_proj.weight"}, r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"),
        ({"add": "model.layers.0.self_attn.sinks"}, r"model\.layers\.0\.self_attn\.sinks of the checkpoint is none"),
        ({"reshape": "model.layers.2.mlp.up_proj.weight"}, r"up_proj\.weight has shape \[3, 5\], config\.json implies \[112, 64\]"),
    ],
)
def test_wrong_tensors_are_named(change: dict[str, str], message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    files = save(random_model(cases()["llama"]), tmp_path)
    tensors = load_file(files.weights[0])
    if "remove" in change:
        del tensors[change["remove"]]
    else:
        tensors[next(iter(change.values()))] = torch.zeros(3, 5)
    save_file(tensors, files.weights[0])
    with pytest.raises(ModelError, match=message):
        load_ours(files)


def test_truncated_safetensors_is_a_model_error(tmp_path: Path) -> None:
    files = save(random_model(cases()["llama"]), tmp_path)
    content = files.weights[0].read_bytes()
    for size in (0, 5, 400, len(content) - 7):
        files.weights[0].write_bytes(content[:size])
        with pytest.raises(ModelError, match="cannot read"):
            load_ours(files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"'GPT2LMHeadModel' is not supported: the decoder of model_type 'llama' is LlamaForCausalLM",
        ),
        ({"architectures": None, "model_type": None}, "names no architecture"),
        ({"architectures": None, "model_type": "gpt_oss"}, "'GptOssForCausalLM' is not supported.*sinks"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "needs a number 'factor'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
        ({"bos_token_id": [True]}, "bos_token_id must be a token id or a list"),
    ],
)
def test_unusable_config_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    files = save(random_model(cases()["llama"]), tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        read_model_info(files)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0}, 256),
        ({"rope_type": "linear", "factor": 0.5}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),  # its angles would change under the keys that are stored
        ({"rope_type": "default"}, 128),
    ],
)
def test_scaled_positions_reach_as_far_as_the_factor_says(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    files = save(random_model(cases()["llama"]), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_scaling": rope}))
    info = read_model_info(files)
    assert info.max_position_embeddings == expected
    machine: dict[str, Any] = {"cuda_available": False, "free_memory_bytes": 1 << 40}
    assert EngineConfig(max_model_len=expected).resolve(info, **machine).scheduler.max_model_len == expected
    with pytest.raises(ConfigError, match=f"exceeds the {expected} positions"):
        EngineConfig(max_model_len=expected + 1).resolve(info, **machine)
    tokens = some_tokens(expected)
    assert_same(logits_of(load_ours(files), tokens), reference_logits(load_reference(tmp_path), tokens))


def test_a_scaling_beyond_the_rotary_table_ends_where_the_table_ends(tmp_path: Path) -> None:
    files = save(random_model(cases()["llama"]), tmp_path)
    path = tmp_path / "config.json"
    rope = {"rope_type": "linear", "factor": 1e9}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_scaling": rope}))
    assert read_model_info(files).max_position_embeddings == (1 << 28) // 16


def test_windows_on_some_layers_only_are_told_layer_by_layer(tmp_path: Path) -> None:
    files = save(random_model(cases()["qwen2-window"]), tmp_path)
    assert read_model_info(files).sliding_window == 9
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"]
    path.write_text(json.dumps(config))
    info = read_model_info(files)
    assert (info.sliding_window, info.windows) == (None, (None, 9, 9))


GEMMA3_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types chunked_attention is not supported"),
    ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer, got 0"),
    ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ({"sliding_window": None}, 'layer_types has "sliding_attention", but there is no window: sliding_window is None'),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, got 50.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be null, got 30.0"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ({"hidden_activation": "mish"}, "hidden_act 'mish' is not supported"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have settings for full_attention and sliding_attention"),
    ({"rope_scaling": {"rope_type": "linear"}}, "needs a number 'factor'"),
]


@pytest.mark.parametrize(("changes", "message"), GEMMA3_ERRORS)
def test_an_unusable_gemma3_config_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    files = save(random_model(cases()["gemma3"]), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        read_model_info(files)


@pytest.mark.parametrize(
    "older",
    [
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e3},
        {"rope_scaling": {"factor": 4.0, "rope_type": "linear"}},
        {"rope_theta": 1e6, "rope_scaling": {"factor": 4.0, "rope_type": "linear"}, "layer_types": None, "sliding_window_pattern": 3},
        {"layer_types": None},
    ],
)
def test_gemma3_configs_of_transformers_4_read_the_same(older: dict[str, Any], tmp_path: Path) -> None:
    """Angles in keys of their own, kinds of layers by a period, and both left out."""
    files = save(random_model(cases()["gemma3"]), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"], config["_sliding_window_pattern"]
    path.write_text(json.dumps({**config, **older}))
    expected = reference_logits(load_reference(tmp_path), some_tokens())
    assert_same(logits_of(load_ours(files), some_tokens()), expected)


def test_gemma3_in_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    """Norms in float32 with the 1 added there, the scale of embeddings in bfloat16: else it is several times as far off."""
    files = save(random_model(cases()["gemma3"]).bfloat16(), tmp_path)
    exact = reference_logits(load_reference(tmp_path), some_tokens())
    reference = reference_logits(load_reference(tmp_path).bfloat16(), some_tokens()).float()
    ours = logits_of(load_ours(files, dtype=torch.bfloat16), some_tokens())
    assert (ours - exact).norm() < 1.2 * (reference - exact).norm()
