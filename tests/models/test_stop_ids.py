"""Where a text ends: every place of a checkpoint that states it counts, each also alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, InvalidRequestError
from aioengine.config import EngineConfig
from aioengine.engine.startup import find_setup
from aioengine.resolved_config import ModelInfo
from tests.models.support import VOCAB, cases, random_model, save
from tests.tiny_tokenizer import byte_level_tokenizer

# Ids 0 to 4; 80 and 81 are letters of the byte-level alphabet.
SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<tool>"]


def folder_with(
    folder: Path, *, config: Any, generation: Any, tokenizer: dict[str, Any] | None, special: list[str], case: str = "qwen2"
) -> Path:
    """A tiny model; `config` and `generation` are the keys of the two files, None: no such file or no such keys."""
    save(random_model(cases()[case]), folder)
    raw = {key: value for key, value in json.loads((folder / "config.json").read_text()).items() if not key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps({**raw, **(config or {})}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    backend = byte_level_tokenizer(SPECIAL)
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer}))
    return folder


async def info_of(folder: Path) -> ModelInfo:
    """As the engine finds it when it starts."""
    setup = await find_setup(EngineConfig(model=str(folder)), tokenizer=None)
    setup.executor.shutdown()
    assert setup.config.model == setup.model_info
    return setup.model_info


NOTHING: dict[str, Any] = {"config": None, "generation": None, "tokenizer": None, "special": []}


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 7}}, {7}),
        ({"config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"generation": {"eos_token_id": 9}}, {9}),
        ({"generation": {"eos_token_id": [9, 10]}}, {9, 10}),
        ({"tokenizer": {"eos_token": "</s>"}, "special": ["</s>"]}, {1}),
        ({"tokenizer": {"eos_token": {"__type": "AddedToken", "content": "</s>"}}}, {1}),
        ({"special": ["<|im_end|>", "<tool>"]}, {2}),
        ({"special": ["<|im_end|>", "<|eot_id|>"]}, {2, 3}),
        ({"tokenizer": {"added_tokens_decoder": {"3": {"content": "<|eot_id|>", "special": True}}}}, {3}),
        ({"config": {"eos_token_id": 7}, "generation": {"eos_token_id": [9, 7]}, "tokenizer": {"eos_token": "</s>"}}, {1, 7, 9}),
        ({"config": {"eos_token_id": 7}, "generation": {"eos_token_id": None}, "special": ["<|im_end|>"]}, {2, 7}),
        ({"generation": {}, "tokenizer": {"eos_token": None}}, set()),
    ],
)
async def test_every_place_counts(places: dict[str, Any], expected: set[int], tmp_path: Path) -> None:
    info = await info_of(folder_with(tmp_path, **{**NOTHING, **places}))
    assert info.eos_token_ids == expected


async def test_special_tokens_map_states_an_end(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **NOTHING)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert (await info_of(folder)).eos_token_ids == {1}


async def test_what_no_file_states_is_the_familys_own(tmp_path: Path) -> None:
    """LlamaConfig assumes 2, as transformers does; a tokenizer that knows better is believed."""
    assert (await info_of(folder_with(tmp_path / "a", **NOTHING, case="llama"))).eos_token_ids == {2}
    places = {**NOTHING, "special": ["<|eot_id|>"]}
    assert (await info_of(folder_with(tmp_path / "b", **places, case="llama"))).eos_token_ids == {3}
    places = {**NOTHING, "config": {"eos_token_id": None}}
    assert (await info_of(folder_with(tmp_path / "c", **places, case="llama"))).eos_token_ids == frozenset()


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("bad", [-1, VOCAB, 10**12, [5, -1], [5, VOCAB]])
async def test_ids_that_the_model_does_not_have_are_ignored_with_a_warning(
    key: str, bad: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place in ("config", "generation"):
        info = await info_of(folder_with(tmp_path / place, **{**NOTHING, place: {key: bad}}))
        found = info.eos_token_ids if key == "eos_token_id" else frozenset({info.bos_token_id} - {None})
        assert found == ({5} if isinstance(bad, list) else frozenset())
        assert f"{key} {bad[-1] if isinstance(bad, list) else bad} is not in the vocabulary of {VOCAB} ids: ignored" in caplog.text
        caplog.clear()


async def test_a_token_of_the_tokenizer_that_the_model_does_not_have_ends_nothing(tmp_path: Path) -> None:
    decoder = {"300": {"content": "<|end_of_text|>", "special": True}}
    info = await info_of(
        folder_with(tmp_path, **{**NOTHING, "config": {"eos_token_id": 7}, "tokenizer": {"added_tokens_decoder": decoder}})
    )
    assert info.eos_token_ids == {7}


async def test_a_tokenizer_of_more_tokens_than_the_model_says_so_and_such_prompts_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_with(tmp_path, **NOTHING)
    async with AsyncEngine(str(folder)) as engine:
        with pytest.raises(InvalidRequestError, match=f"not in the vocabulary of {VOCAB} ids"):
            await anext(engine.generate("é"))
    assert f"the tokenizer has 262 tokens, the model {VOCAB} (vocab_size)" in caplog.text


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [({"bos_token_id": 4}, None, 4), (None, {"bos_token_id": 6}, 6), ({"bos_token_id": 4}, {"bos_token_id": 6}, 6), (None, {}, None)],
)
async def test_the_beginning_is_generation_configs_then_configs(config: Any, generation: Any, expected: int | None, tmp_path: Path) -> None:
    assert (await info_of(folder_with(tmp_path, **{**NOTHING, "config": config, "generation": generation}))).bos_token_id == expected
