"""LoRA adapters over HTTP: a request's `model` chooses, and answers say what they come from."""

from __future__ import annotations

from typing import Any

from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.server import ServerSettings


async def test_the_model_field_chooses_the_adapter_and_is_in_the_answer(serve: Any) -> None:
    async with serve(loras={"sql": "/adapters/sql"}) as served:
        events = served.engine.events()
        for model in ("sql", "fake", None):
            answer = await served.complete("abc", model=model, max_tokens=2)
            assert answer["model"] == (model or "fake")
        assert (await served.chat(model="sql"))["model"] == "sql"
        assert {chunk["model"] for chunk in await served.chunks(model="sql")} == {"sql"}
        names = []
        async for event in events:
            if isinstance(event, StepEvent | StepResultEvent):
                names += [info.lora_name for info in event.added]
            if len(names) == 5:
                break
    assert names == ["sql", None, None, "sql", "sql"]


async def test_adapters_are_listed_as_models_while_they_are_loaded(serve: Any) -> None:
    async with serve(loras={"sql": "/adapters/sql"}) as served:

        async def listed() -> list[str]:
            return [card["id"] for card in (await served.client.get("/v1/models")).json()["data"]]

        assert await listed() == ["fake", "sql"]
        assert (await served.client.get("/v1/models/sql")).json()["id"] == "sql"
        await served.engine.load_lora("legal", "/adapters/legal")
        await served.engine.unload_lora("sql")
        assert await listed() == ["fake", "legal"]
        assert (await served.client.get("/v1/models/sql")).status_code == 404
        error = await served.complete("abc", model="sql", status=404)
        assert "'sql' is not served here" in error["error"]["message"]


async def test_a_name_of_the_model_itself_means_the_model(serve: Any) -> None:
    async with serve(loras={"fake": "/adapters/fake"}, settings=ServerSettings(served_model_names=["fake"])) as served:
        with served.engine.events() as events:
            await served.complete("abc", model="fake", max_tokens=1)
            async for event in events:
                if isinstance(event, StepEvent) and event.added:
                    assert event.added[0].lora_name is None
                    break


async def test_embeddings_refuse_an_adapter_by_name(serve: Any) -> None:
    async with serve(loras={"sql": "/adapters/sql"}) as served:
        error = await served.post("/v1/embeddings", {"input": "abc", "model": "sql"}, status=400)
        assert "'sql' is a LoRA adapter" in error["error"]["message"]


async def test_equal_prompts_share_cached_blocks_within_an_adapter_only(serve: Any) -> None:
    async with serve(loras={"sql": "/adapters/sql", "legal": "/adapters/legal"}) as served:
        hits = []
        for model in ("sql", "legal", "fake", "sql", "legal", "fake"):
            before = served.engine.stats().prefix_cache_hits
            await served.complete("abcdefghijklmnop", model=model, max_tokens=1)
            hits.append(served.engine.stats().prefix_cache_hits - before)
    assert hits[:3] == [0, 0, 0]
    assert min(hits[3:]) > 0
