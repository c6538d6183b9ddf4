"""A KV cache on disk changes no token, outlives engines, and is computed again where it is damaged."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from aioengine import AsyncEngine, RequestOutput, SamplingParams
from aioengine.errors import AioEngineError, ConfigError
from aioengine.events.recording.reader import read_recording
from aioengine.kv_connector import file_store, segment
from aioengine.replay.frames import replay_frames
from aioengine.replay.tokens import replay_tokens
from aioengine_kernels.cpu import status as native_status

WEIGHTS = ["dense", *(["exact", "fast"] if native_status() is None else [])]
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)


def engine_for(model: Path, folder: Path | None, **options: Any) -> AsyncEngine:
    defaults: dict[str, Any] = {"weights": "dense", "max_model_len": 256, "num_kv_cache_blocks": 40}
    kept = None if folder is None else str(folder)
    return AsyncEngine(str(model), kv_cache_dir=kept, dtype="float32", check_invariants=True, **{**defaults, **options})


def prompts_of(num: int, seed: int = 1) -> list[list[int]]:
    """Some share a beginning of a few blocks."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(2, 258) for _ in range(4 * BLOCK)] for _ in range(3)]
    return [
        [*beginnings[i % 3][: rng.randrange(4 * BLOCK)], *(rng.randrange(2, 258) for _ in range(rng.randrange(1, 60)))] for i in range(num)
    ]


async def answers(engine: AsyncEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    return await engine.generate_batch(prompts, GREEDY, progress=False)


def damage(folder: Path) -> None:
    """Flip bits, and cut the files off."""
    for path in folder.glob("*/*.data"):
        content = bytearray(path.read_bytes())
        for at in range(100, len(content), 5000):
            content[at] ^= 0x40
        path.write_bytes(content[: len(content) * 3 // 4])


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.outputs[0].logprobs) for output in outputs]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("overlap", [True, False])
async def test_tokens_do_not_depend_on_where_blocks_come_from(tiny_model: Path, tmp_path: Path, weights: str, overlap: bool) -> None:
    options = {"weights": weights, "async_scheduling": overlap, "max_num_batched_tokens": 48, "max_num_seqs": 6}
    prompts = prompts_of(12)
    async with engine_for(tiny_model, None, enable_prefix_caching=False, **options) as engine:
        expected = await answers(engine, prompts)
    for turn in range(2):
        record = tmp_path / f"{turn}.jsonl"
        # So few blocks that most of what is computed leaves, and that some requests are preempted.
        async with engine_for(tiny_model, tmp_path / "kv", num_kv_cache_blocks=20, record=record, publish_text=True, **options) as engine:
            outputs = await answers(engine, prompts)
            stats = engine.stats()
        assert tokens(outputs) == tokens(expected)
        if weights != "dense":  # PyTorch's products may differ in the last bit with the number of rows
            assert bits(outputs) == bits(expected)
        assert (stats.external_prefix_cache_hits > 0) == (turn > 0)
        recording = read_recording(record)
        report = replay_frames(recording.header, recording.events)
        assert report.difference is None
        assert report.num_steps > 10
        if weights != "dense":
            again = await replay_tokens(recording.header, recording.events)
            assert again.difference is None
            assert again.num_token_lists > 100


async def test_a_restart_loads_instead_of_computing(tiny_model: Path, tmp_path: Path) -> None:
    prompt = prompts_of(1)[0] * 3
    async with engine_for(tiny_model, tmp_path) as engine:
        (first,) = await answers(engine, [prompt])
    async with engine_for(tiny_model, tmp_path) as engine:
        (again,) = await answers(engine, [prompt])
        stats = engine.kv_connector_stats()
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert stats.num_loaded_blocks == (len(prompt) - 1) // BLOCK
    assert stats.num_saved_blocks == 0


async def test_damaged_blocks_are_computed_again(tiny_model: Path, tmp_path: Path) -> None:
    prompts = prompts_of(6)
    async with engine_for(tiny_model, tmp_path) as engine:
        first = await answers(engine, prompts)
    damage(tmp_path)
    async with engine_for(tiny_model, tmp_path) as engine:
        assert tokens(await answers(engine, prompts)) == tokens(first)
        assert engine.kv_connector_stats().num_damaged_blocks > 0


async def test_another_way_of_computing_finds_nothing(tiny_model: Path, tmp_path: Path) -> None:
    prompts = prompts_of(3)
    async with engine_for(tiny_model, tmp_path) as engine:
        await answers(engine, prompts)
    async with engine_for(tiny_model, tmp_path, kv_cache_dtype="bfloat16") as engine:
        await answers(engine, prompts)
        assert engine.stats().external_prefix_cache_hits == 0


async def test_a_salt_separates_what_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    prompt = prompts_of(1)[0] * 3
    for salt, expected in (("a", 0), ("b", 0), ("a", (len(prompt) - 1) // BLOCK * BLOCK)):
        async with engine_for(tiny_model, tmp_path) as engine:
            async for output in engine.generate(prompt, GREEDY, cache_salt=salt):
                last = output
        assert last.num_cached_tokens == expected, salt


async def test_others_run_while_a_slow_disk_reads(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, other = prompts_of(1)[0] * 3, [9, 8, 7]
    async with engine_for(tiny_model, tmp_path) as engine:
        (expected,) = await answers(engine, [prompt])
    real = segment.read_block

    turns = threading.Event()

    def read_when_told(*args: Any, **options: Any) -> bytes | None:
        assert turns.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(file_store, "read_block", read_when_told)
    async with engine_for(tiny_model, tmp_path) as engine:
        waiting = asyncio.create_task(answers(engine, [prompt]))
        while not engine.stats().num_loading_reqs:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0)
        await answers(engine, [other])
        assert engine.stats().num_loading_reqs == 1, "it still waits, and the other one is done"
        turns.set()
        (output,) = await waiting
    assert tokens([output]) == tokens([expected])


async def test_a_request_may_be_aborted_while_its_blocks_are_read(tiny_model: Path, tmp_path: Path) -> None:
    prompts = prompts_of(8)
    async with engine_for(tiny_model, tmp_path) as engine:
        expected = await answers(engine, prompts)
    async with engine_for(tiny_model, tmp_path, num_kv_cache_blocks=20) as engine:
        for number, prompt in enumerate(prompts * 6):
            stream = engine.generate(prompt, GREEDY, request_id=f"gone-{number}")
            task = asyncio.ensure_future(anext(stream))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            await stream.aclose()
        assert tokens(await answers(engine, prompts)) == tokens(expected)


async def test_two_engines_share_a_folder(tiny_model: Path, tmp_path: Path) -> None:
    prompt = prompts_of(1)[0] * 3
    async with engine_for(tiny_model, tmp_path) as first, engine_for(tiny_model, tmp_path) as second:
        (expected,) = await answers(first, [prompt])
        assert await first.save_prefix_cache() > 0
        assert await first.save_prefix_cache() == 0, "it is there already"
        await answers(second, [prompt[: BLOCK + 1]])  # asks, and so learns of what is new
        await asyncio.sleep(1.1)
        await answers(second, [[7] * (BLOCK + 1)])
        await asyncio.sleep(0.2)
        (output,) = await answers(second, [prompt])
        assert second.stats().external_prefix_cache_hits > 0
    assert output.token_ids == expected.token_ids


async def test_settings_that_cannot_be(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching=False forbids"):
        async with engine_for(tiny_model, tmp_path, enable_prefix_caching=False):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_cache_dir"):
        async with engine_for(tiny_model, tmp_path / "file"):
            pass
    async with engine_for(tiny_model, None) as engine:
        with pytest.raises(AioEngineError, match="needs an engine with kv_cache_dir"):
            await engine.save_prefix_cache()
