"""The wire form: what goes in comes out, except prompts unless they are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson
import pytest
from hypothesis import given

from aioengine.config import EngineConfig, ModelInfo
from aioengine.core.scheduler_output import (
    BlockChanges,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from aioengine.events.step_event import SCHEMA_VERSION, EngineSnapshot, Event, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import HIDDEN_TOKEN_ID, WireError, WireHeader, decode, decode_header, encode, encode_header
from aioengine.sampling_params import SamplingParams
from tests.events.strategies import events

STEP = StepEvent(
    step_id=3,
    time=1.5,
    output=SchedulerOutput(
        step_id=3,
        scheduled_new_reqs=[NewRequestData("new", [11, 12, 13], SamplingParams(seed=1, stop=("END",)), ([4],), 0)],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["old"],
            resumed_req_ids=frozenset({"old"}),
            all_token_ids={"old": [21, 22]},
            new_block_ids=[([5, 6],)],
            num_computed_tokens=[1],
            num_output_tokens=[1],
        ),
        num_scheduled_tokens={"new": 3, "old": 1},
        total_num_scheduled_tokens=4,
        finished_req_ids=frozenset({"b", "a"}),
    ),
    stats=SchedulerStats(1, 2, 0, 100, 90, 5, 0, 30, 16),
    admission_stop="budget",
    token_budget=512,
    block_changes=BlockChanges([4, 5, 6]),
    queue_depth=1,
    schedule_start=1.0,
    schedule_end=1.25,
    added=[RequestInfo("new", 3, 16, 0.5, prompt="a secret")],
)


def without_prompts(event: Event) -> Event:
    """What a reader sees of `event` when prompts travel as lengths."""
    if isinstance(event, EngineSnapshot):
        return dataclasses.replace(event, requests=[dataclasses.replace(req, prompt=None, text=None) for req in event.requests])
    if isinstance(event, StepResultEvent):
        return dataclasses.replace(event, new_text={}, added=[dataclasses.replace(info, prompt=None) for info in event.added])
    new = [
        dataclasses.replace(req, prompt_token_ids=[HIDDEN_TOKEN_ID] * len(req.prompt_token_ids)) for req in event.output.scheduled_new_reqs
    ]
    cached = event.output.scheduled_cached_reqs
    hidden = {req_id: [HIDDEN_TOKEN_ID] * len(ids) for req_id, ids in cached.all_token_ids.items()}
    output = dataclasses.replace(
        event.output,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=dataclasses.replace(cached, all_token_ids=hidden),
        scheduled_spec_decode_tokens={
            req_id: [HIDDEN_TOKEN_ID] * len(ids) for req_id, ids in event.output.scheduled_spec_decode_tokens.items()
        },
    )
    return dataclasses.replace(event, output=output, added=[dataclasses.replace(info, prompt=None) for info in event.added])


@given(events)
def test_round_trip_with_prompts_is_equal(event: Event) -> None:
    line = encode(event, include_prompts=True)
    assert decode(line) == event
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


@given(events)
def test_round_trip_without_prompts_keeps_everything_else(event: Event) -> None:
    line = encode(event)
    assert decode(line) == without_prompts(event)
    assert encode(decode(line)) == line


def test_prompts_leave_the_process_only_when_asked_for() -> None:
    hidden, shown = encode(STEP), encode(STEP, include_prompts=True)
    assert b"secret" not in hidden
    assert b"[11,12,13]" not in hidden
    assert b"[21,22]" not in hidden
    assert b"secret" in shown
    assert b"[11,12,13]" in shown


def test_sampling_params_travel() -> None:
    event = decode(encode(STEP))
    assert isinstance(event, StepEvent)
    assert event.output.scheduled_new_reqs[0].sampling_params == SamplingParams(seed=1, stop=("END",))


def test_equal_events_are_equal_bytes() -> None:
    assert orjson.loads(encode(STEP))["output"]["finished_req_ids"] == ["a", "b"]


def resolved_config() -> Any:
    info = ModelInfo("tiny", "/models/tiny", "LlamaForCausalLM", 100, 256, 2, 4, 2, 16, "float32", frozenset({2, 1}))
    return EngineConfig(model="tiny").resolve(info, cuda_available=False, free_memory_bytes=1 << 30)


def test_header_round_trip_with_a_resolved_config() -> None:
    header = WireHeader.create("tiny", resolved_config())
    assert decode_header(encode_header(header)) == header
    assert header.config["scheduler"]["max_num_seqs"] == 64
    assert header.config["model"]["eos_token_ids"] == [1, 2]
    assert header.schema_version == SCHEMA_VERSION


def test_a_newer_schema_is_refused_with_both_versions() -> None:
    line = orjson.dumps({"type": "header", "schema_version": SCHEMA_VERSION + 1, "engine_version": "9.9", "new_field": 1})
    with pytest.raises(WireError, match=rf"schema version {SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}.*9\.9.*upgrade"):
        decode_header(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{}", "no header"),
        (b"hello", "not JSON"),
        (b'{"type": "step"}', "no header"),
        (b'{"type": "header", "schema_version": "one"}', "'one' is not a positive integer"),
        (b'{"type": "header", "schema_version": 1}', "not a header of schema version 1"),
    ],
)
def test_a_bad_header_is_named(line: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode_header(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not JSON"),
        (b'{"type": "step", "step_id"', "not JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b'{"type": "party"}', "unknown event type 'party'; known: step, result, snapshot"),
        (b'{"type": ["step"]}', "unknown event type"),
        (b'{"type": "snapshot", "step_id": 1}', "not a snapshot event"),
        (encode(STEP).replace(b'"token_budget"', b'"purse"'), "not a step event.*purse"),
        (encode(STEP).replace(b'"sampling_params":{', b'"sampling_params":{"temperature":-1.0,'), "temperature must be"),
    ],
)
def test_a_bad_event_is_named(line: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(line)
