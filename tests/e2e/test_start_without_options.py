"""Models whose longest text would not fit into the KV cache start without options, and say how long a text may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aioengine import AsyncEngine, ConfigError, InvalidRequestError, SamplingParams
from aioengine.testing.executor import FakeExecutor
from aioengine.testing.tokens import FakeTokenizer

# What the KV cache of the real ones is made of; the rest is small.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


@pytest.fixture(scope="module", params=SHAPES)
def long_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.tiny_tokenizer import byte_level_tokenizer

    folder = tmp_path_factory.mktemp("long")
    shape = SHAPES[request.param]
    config = AutoConfig.for_model(**shape, vocab_size=272, hidden_size=32, intermediate_size=32, eos_token_id=0, bos_token_id=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    byte_level_tokenizer(["<eos>", "<bos>"]).save(str(folder / "tokenizer.json"))
    return folder, shape


async def test_a_long_model_starts_and_says_how_long(long_model: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    folder, shape = long_model
    async with AsyncEngine(str(folder)) as engine:
        limit = engine.resolved_config.scheduler.max_model_len
        bytes_per_token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
        most = engine.resolved_config.cache.kv_cache_memory_bytes // bytes_per_token
        assert most - 64 < limit < most < shape["max_position_embeddings"]
        (output,) = await engine.generate_batch([[5] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.token_ids) == 3
        with pytest.raises(InvalidRequestError, match=f"max_model_len is {limit}"):
            await anext(engine.generate([5] * limit))
    lines = [record.getMessage() for record in caplog.records if "max_model_len" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith(f"max_model_len is {limit} tokens")
    assert f"the {shape['max_position_embeddings']} of {folder} take" in lines[0]


async def test_the_length_that_was_found_is_in_the_recordings_header(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    executor = FakeExecutor(num_blocks=9, block_size=4)  # 8 blocks, 32 tokens
    async with AsyncEngine("fake", executor=executor, tokenizer=FakeTokenizer(), block_size=4, record=path) as engine:
        assert engine.resolved_config.scheduler.max_model_len == 32
    header = json.loads(path.read_text().splitlines()[0])
    assert '"max_model_len": 32' in json.dumps(header)


@pytest.mark.parametrize("options", [{"max_model_len": 64}, {"num_kv_cache_blocks": 9}])
async def test_what_the_user_gave_stays(options: dict[str, Any]) -> None:
    executor = FakeExecutor(num_blocks=9, block_size=4)
    async with AsyncEngine("fake", executor=executor, tokenizer=FakeTokenizer(), block_size=4, **options) as engine:
        assert engine.resolved_config.scheduler.max_model_len == options.get("max_model_len", 4096)


async def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error(long_model: tuple[Path, dict[str, Any]]) -> None:
    folder, shape = long_model
    most = shape["max_position_embeddings"]
    with pytest.raises(ConfigError, match=rf"max_model_len \({most}\) tokens takes .* GiB, but .* GiB are allowed, which hold \d+ tokens"):
        async with AsyncEngine(str(folder), max_model_len=most, kv_cache_memory_bytes=64 << 20, tokenizer=FakeTokenizer()):
            pass
    async with AsyncEngine(str(folder), max_model_len=100, kv_cache_memory_bytes=64 << 20, tokenizer=FakeTokenizer()) as engine:
        assert engine.resolved_config.scheduler.max_model_len == 100
