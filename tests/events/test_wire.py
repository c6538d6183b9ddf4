"""The wire form: what goes in comes out, except prompts unless they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.config import EngineConfig
from aioengine.core.scheduler_output import (
    BlockChanges,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from aioengine.events.json_form import json_form
from aioengine.events.recording.reader import read_recording
from aioengine.events.step_event import (
    SCHEMA_VERSION,
    EngineSnapshot,
    Event,
    FinishedInfo,
    RequestInfo,
    RequestSnapshot,
    StepEvent,
    StepResultEvent,
)
from aioengine.events.wire import HIDDEN_TOKEN_ID, WireError, WireHeader, decode, decode_header, encode, encode_header
from aioengine.printable import printable, printable_json
from aioengine.replay.frames import replay_frames
from aioengine.resolved_config import ModelInfo
from aioengine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import state_to_json
from aioengine_tui.plain import render_plain
from tests.events.strategies import accepted_events, events

DATA = Path(__file__).parent / "data"

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
    stopped_req_id="next",
    num_blocks_needed=3,
)


RESULT = StepResultEvent(
    step_id=3,
    time=1.75,
    num_new_tokens={"new": 1},
    stats=SchedulerStats(1, 2, 0, 100, 90, 5, 0, 30, 16),
    block_changes=BlockChanges([4], [5], [6], [7], ["ab"], [""], [1], [True]),
    queue_depth=1,
    execute_start=1.5,
    execute_end=1.6,
    sample_start=1.6,
    sample_end=1.7,
    update_start=1.7,
    update_end=1.75,
    finished=[FinishedInfo("old", "stop", 5, "END")],
    added=[RequestInfo("next", 3, 16, 0.5, prompt="a secret")],
    new_text={"new": "Hi"},
    grammar_start=1.25,
    grammar_end=1.5,
)
SNAPSHOT = EngineSnapshot(
    step_id=3,
    time=2.5,
    stats=SchedulerStats(1, 2, 0, 100, 90, 5, 0, 30, 16),
    requests=[
        RequestSnapshot(
            *("new", "RUNNING", 3, 1, 3, 0, 16, 0.5, 0, 0, [4]),
            SamplingParams(
                temperature=0.5,
                seed=1,
                stop=("END",),
                stop_token_ids=(7,),
                logit_bias={5: 1.5},
                bad_words_token_ids=((1, 2),),
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=StructuredOutputsParams(choice=("a", "b")),
                repetition_detection=RepetitionDetectionParams(4, 1, 3),
            ),
            prompt="a secret",
            text="Hi",
            recompute_until=2,
            scheduled_time=1.0,
            first_token_time=1.75,
            other_block_ids=[[0, 7]],
        )
    ],
    cached_block_ids=[4],
    cached_block_groups=[0],
    cached_block_hashes=["ab"],
    cached_parent_hashes=[""],
    free_block_ids=[9, 8],
    last_step=STEP,
    last_result=RESULT,
    lingering={"gone": 2},
    num_in_flight=1,
)


def without_prompts(event: Event) -> Event:
    """What a reader sees of `event` when prompts travel as lengths."""
    if isinstance(event, EngineSnapshot):
        last_step, last_result = (told and without_prompts(told) for told in (event.last_step, event.last_result))
        requests = [dataclasses.replace(req, prompt=None, text=None) for req in event.requests]
        return dataclasses.replace(event, requests=requests, last_step=last_step, last_result=last_result)  # type: ignore[arg-type]
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


@settings(max_examples=100, deadline=None)
@given(accepted_events, st.booleans())
def test_every_event_of_accepted_parameters_is_written_read_and_replayed(event: Event, include_prompts: bool) -> None:
    line = encode(event, include_prompts=include_prompts)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    read = decode(line)
    expected = event if include_prompts else without_prompts(event)
    # A JSON schema of a user's own objects has no equal form; what is marked may differ, and nothing else.
    assert read.approximate or json_form(dataclasses.asdict(read)) == json_form(dataclasses.asdict(expected))
    assert encode(decode(line), include_prompts=include_prompts) == line, "a recording can be copied"
    state = DashboardState()
    state.apply(read)
    shown = printable_json(state_to_json(state))
    assert printable(shown) == shown
    assert printable(render_plain(state), keep="\n") == render_plain(state)


class _Angry(Mapping[str, object]):
    """A mapping that cannot be looked into."""

    def __getitem__(self, key: str) -> object:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("no")

    def __len__(self) -> int:
        return 1


_LOOP: list[object] = []
_LOOP.append(_LOOP)
_DEEP: list[object] = []
for _ in range(5000):
    _DEEP = [_DEEP]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (2**70, 2**64 - 1),
        (-(10**400), -(2**63)),
        (np.int64(7), 7),
        (np.float32(0.5), 0.5),
        ("a\ud800b", "a\\ud800b"),
        ({1: "x", None: "y", "\udfff": 2}, {"1": "x", "None": "y", "\\udfff": 2}),
        ({10**5000: 1}, {str(2**64 - 1): 1}),
        (MappingProxyType({"a": (1, 2)}), {"a": [1, 2]}),
        ({"b", "a"}, ["a", "b"]),
        (b"bytes", "<bytes>"),
        (object(), "<object>"),
        (_Angry(), "<_Angry>"),
        (RequestOutputKind.DELTA, 1),
        (
            FinishedInfo("a", "stop", 2**70),
            {"request_id": "a", "finish_reason": "stop", "num_output_tokens": 2**64 - 1, "stop_reason": None},
        ),
    ],
)
def test_what_json_has_no_form_for_gets_the_nearest_one(value: object, form: object) -> None:
    assert json_form(value) == form
    assert orjson.loads(orjson.dumps(json_form(value))) == form


def test_what_holds_itself_ends_somewhere() -> None:
    assert b"\\u2026" in orjson.dumps(json_form(_LOOP)).decode().encode("ascii", "backslashreplace")
    assert b"\\u2026" in orjson.dumps(json_form(_DEEP)).decode().encode("ascii", "backslashreplace")


def test_an_event_that_is_not_exact_says_so_and_an_exact_one_does_not() -> None:
    odd = dataclasses.replace(STEP, added=[RequestInfo("new", 3, 16, 0.5, priority=2**70)])
    read = decode(encode(odd))
    assert isinstance(read, StepEvent)
    assert read.approximate
    assert read.added[0].priority == 2**64 - 1
    assert not decode(encode(STEP)).approximate


def test_a_header_of_any_file_name_is_written() -> None:
    header = WireHeader.create("model\udcff", {"path": "/models/\udcff", "seed": 2**70})
    assert decode_header(encode_header(header)) == dataclasses.replace(header, model="model\\udcff")


# ---------------------------------------------------------------------------------------------------- other versions
@pytest.mark.parametrize(("name", "num_events"), [("schema_1.jsonl", 4), ("schema_1_with_text.jsonl", 19)])
def test_recordings_of_schema_1_still_read_and_replay(name: str, num_events: int) -> None:
    recording = read_recording(DATA / name)
    assert recording.header.schema_version == 1
    assert len(recording.events) == num_events
    state = DashboardState()
    state.apply(recording.header)
    for event in recording.events:
        assert not event.approximate, "a field that the line lacks has its default"
        state.apply(event)
    ends = {row.request_id: row.finish_reason for row in state.rows()}
    if recording.header.include_prompts:
        assert ends == {"first": "length", "second": "length", "third \N{SNOWMAN}": "abort"}
        assert state.totals.num_preemptions == 1
        params = next(event for event in recording.events if isinstance(event, StepEvent)).output.scheduled_new_reqs[0].sampling_params
        assert params == SamplingParams(temperature=0.5, top_k=7, seed=2**63 + 5, max_tokens=3, stop=("zzz",), logit_bias={5: 1.5})
        snapshot = next(event for event in recording.events if isinstance(event, EngineSnapshot))
        assert snapshot.requests[0].prompt == "hello world"
    else:
        assert ends == {"only": "length"}


def test_a_recording_of_schema_2_still_reads_and_says_whose_totals_it_has() -> None:
    """It was written by the last engine before the totals travelled; it has a preemption, evictions, an abort and snapshots."""
    recording = read_recording(DATA / "schema_2.jsonl")
    assert recording.header.schema_version == 2
    state = DashboardState()
    state.apply(recording.header)
    for event in recording.events:
        assert not event.approximate
        state.apply(event)
        assert state.totals.origin == "since_attach"
        assert state.blocks.num_used == event.stats.num_used_blocks
        assert state.blocks.num_cached == event.stats.num_cached_blocks
    totals = state.totals
    assert (totals.num_steps, totals.num_finished, totals.num_aborted, totals.num_preemptions) == (82, 9, 1, 1)
    assert (totals.num_output_tokens, totals.num_evicted_blocks) == (153, 36)
    assert totals.num_prompt_tokens_computed + totals.num_cached_tokens == sum(row.num_prompt_tokens for row in state.finished.values())
    assert state.blocks.eviction_order() is None
    assert all(node.parent_hash for node in state.blocks.prefix_nodes())
    state_to_json(state, complete=True)


def test_a_recording_of_schema_4_still_runs_again_and_has_one_group() -> None:
    """It was written by the last engine before KV-cache groups, without text; it has preemptions, evictions and draft-free decoding."""
    recording = read_recording(DATA / "schema_4.jsonl")
    assert recording.header.schema_version == 4
    report = replay_frames(recording.header, recording.events)
    assert (report.difference, report.num_steps, report.num_preemptions) == (None, 113, 4)
    state = DashboardState()
    state.apply(recording.header)
    for event in recording.events:
        state.apply(event)
        assert state.blocks.num_used == event.stats.num_used_blocks
    assert len(state.groups) == 1


def test_parameters_that_only_an_older_engine_took_still_read() -> None:
    line = encode(STEP).replace(b'"sampling_params":{', b'"sampling_params":{"temperature":-1.0,"bad_words":["x"],')
    with pytest.raises(WireError, match="temperature must be"):
        decode(line)
    event = decode(line, schema_version=1)
    assert isinstance(event, StepEvent)
    params = event.output.scheduled_new_reqs[0].sampling_params
    assert (params.temperature, params.bad_words, params.stop, params.top_k) == (-1.0, ("x",), ("END",), 0)
    with pytest.raises(WireError, match=r"not a step event of schema version 1.*heat"):
        decode(line.replace(b'"temperature"', b'"heat"'), schema_version=1)


@pytest.mark.parametrize("cls", [StepEvent, StepResultEvent, EngineSnapshot, SchedulerOutput, SchedulerStats, BlockChanges, RequestInfo])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_line_that_lacks_a_field_with_a_default_reads(cls: type[Any], data: st.DataObject) -> None:
    """So a field that is added with a default changes no older recording."""
    event = data.draw(events)
    line = orjson.loads(encode(event, include_prompts=True))
    optional = [f.name for f in dataclasses.fields(cls) if _has_default(f)]
    holders = list(_objects_with_fields(line, [f.name for f in dataclasses.fields(cls)]))
    if optional and holders:
        del data.draw(st.sampled_from(holders))[data.draw(st.sampled_from(optional))]
    decode(orjson.dumps(line))


@pytest.mark.parametrize("event", [STEP, RESULT, SNAPSHOT], ids=lambda event: type(event).__name__)
def test_a_wrong_type_in_any_field_is_refused_by_its_name(event: Event) -> None:
    line = orjson.loads(encode(event, include_prompts=True))
    fields = list(_checked_fields(line))
    assert len(fields) > 25
    for holder, name in fields:
        was = holder[name]
        wrong: Any
        for wrong in ("x", 1, [{}], {"x": []}, True):
            if type(wrong) is type(was) is not list or (type(wrong) is int and type(was) is float):
                continue
            holder[name] = wrong
            with pytest.raises(WireError, match=rf"not a \w+ event of schema version {SCHEMA_VERSION}: .*{name}"):
                decode(orjson.dumps(line))
        holder[name] = was
    assert decode(orjson.dumps(line)) == event


def _checked_fields(line: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field of a line with the object that holds it, but for the type, what is None, and what may be several things."""
    if isinstance(line, dict):
        for name, value in line.items():
            if name in _FIELD_NAMES and value is not None:
                yield line, name
            yield from _checked_fields(value)
    elif isinstance(line, list):
        for value in line:
            yield from _checked_fields(value)


_FIELD_NAMES = {
    f.name
    for cls in (
        *(StepEvent, StepResultEvent, EngineSnapshot, RequestInfo, FinishedInfo, SchedulerOutput, SchedulerStats, BlockChanges),
        *(NewRequestData, CachedRequestData, RequestSnapshot, SamplingParams, StructuredOutputsParams, RepetitionDetectionParams),
    )
    for f in dataclasses.fields(cls)
} - {"stop_reason", "stop", "json"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"token_budget":512', b'"token_budget":"x"', "token_budget: Expected `int`, got `str`"),
        (b'"token_budget":512', b'"token_budget":512,"purse":1', "unknown field `purse`"),
        (b'"num_free_blocks":90', b'"num_free_blocks":90.5', "stats.num_free_blocks: Expected `int`"),
        (b'"new_block_ids":[[[5,6]]]', b'"new_block_ids":[[["five"]]]', r"new_block_ids\[0\]\[0\]\[0\]: Expected `int`"),
        (b'"admission_stop":"budget"', b'"admission_stop":"tired"', "admission_stop: Invalid enum value 'tired'"),
        (b'"seed":1', b'"seed":"one"', r"scheduled_new_reqs\[0\].sampling_params.seed: Expected"),
        (b'"seed":1', b'"seed":1,"top_p":2.5', "top_p must be"),
        (b'"seed":1', b'"seed":1,"output_kind":"LOUD"', "output_kind: Invalid enum value 'LOUD'"),
        (b'"num_prompt_tokens":3}],"scheduled', b'"num_prompt_tokens":-1}],"scheduled', "-1 tokens are not"),
        (b',"num_prompt_tokens":3}],"scheduled', b'}],"scheduled', "neither prompt_token_ids nor num_prompt_tokens"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_place(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    line = encode(STEP)
    assert line.count(old) == 1
    path = tmp_path / "steps.jsonl"
    path.write_bytes(encode_header(WireHeader.create("tiny")) + line + line.replace(old, new))
    with pytest.raises(WireError, match=rf"steps.jsonl, line 3: not a step event of schema version {SCHEMA_VERSION}: .*{message}"):
        read_recording(path)


@pytest.mark.parametrize(
    ("field", "value"), [("model", 7), ("config", []), ("unix_time", "now"), ("perf_counter", None), ("include_prompts", 1), ("new", 1)]
)
def test_a_header_field_that_is_wrong_is_named(field: str, value: object) -> None:
    fields = orjson.loads(encode_header(WireHeader.create("tiny"))) | {field: value}
    with pytest.raises(WireError, match=rf"not a header of schema version {SCHEMA_VERSION}: .*{field}"):
        decode_header(orjson.dumps(fields))


@settings(max_examples=50, deadline=None)
@given(events, st.booleans())
def test_equal_events_are_equal_bytes_whatever_was_left_to_the_library(event: Event, include_prompts: bool) -> None:
    """A step with nothing to hide is written as it stands; its fields come in the same order all the same."""
    line = orjson.loads(encode(event, include_prompts=include_prompts))
    assert [name for name in line if name != "type"] == [f.name for f in dataclasses.fields(event)]
    assert next(iter(line)) == "type"
    if isinstance(event, StepEvent):
        assert line["output"]["finished_req_ids"] == sorted(event.output.finished_req_ids)
        assert line["output"]["scheduled_cached_reqs"]["resumed_req_ids"] == sorted(event.output.scheduled_cached_reqs.resumed_req_ids)
        assert list(line["output"]["num_scheduled_tokens"]) == list(event.output.num_scheduled_tokens)


def test_sets_are_sorted_also_in_a_step_that_hides_nothing() -> None:
    ids = frozenset(f"request-{number}" for number in range(50))
    for name in ("finished_req_ids", "preempted_req_ids", "structured_output_request_ids"):
        output = SchedulerOutput(3, [], CachedRequestData(), {}, 0, **{name: ids})  # type: ignore[arg-type]
        line = orjson.loads(encode(dataclasses.replace(STEP, output=output, added=[])))
        assert line["output"][name] == sorted(ids)
    output = SchedulerOutput(3, [], CachedRequestData(resumed_req_ids=ids), {}, 0)
    line = orjson.loads(encode(dataclasses.replace(STEP, output=output, added=[])))
    assert line["output"]["scheduled_cached_reqs"]["resumed_req_ids"] == sorted(ids)


def test_integers_beyond_64_bits_are_written_as_the_nearest_that_every_reader_takes() -> None:
    for odd in (
        dataclasses.replace(STEP, added=[RequestInfo("new", 3, 16, 0.5, priority=-(2**70))]),
        _with_params(SamplingParams(stop_token_ids=[2**64])),
        _with_params(SamplingParams(allowed_token_ids=[5, 2**70])),
        _with_params(SamplingParams(bad_words_token_ids=((1,), (2, 2**64)))),
        _with_params(SamplingParams(logit_bias={2**65: 1.0})),
    ):
        assert decode(encode(odd)).approximate
    exact = _with_params(SamplingParams(stop_token_ids=[2**64 - 1], seed=2**64 - 1))
    assert decode(encode(exact, include_prompts=True)) == exact


def _with_params(params: SamplingParams) -> StepEvent:
    new = dataclasses.replace(STEP.output.scheduled_new_reqs[0], sampling_params=params)
    return dataclasses.replace(STEP, output=dataclasses.replace(STEP.output, scheduled_new_reqs=[new]), added=[])


def _has_default(f: dataclasses.Field[Any]) -> bool:
    return f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING


def _objects_with_fields(value: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if set(names) == value.keys() - {"type"}:
            yield value
        for inner in value.values():
            yield from _objects_with_fields(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects_with_fields(inner, names)


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
        (encode(STEP).replace(b'"step_id":3,"time"', b'"step_id":"../../x","time"'), "step_id: Expected `int`, got `str`"),
        (encode(STEP).replace(b'"num_prompt_tokens":3}', b'"num_prompt_tokens":1000000000000}'), "1000000000000 tokens are not"),
        (encode(STEP).replace(b'"sampling_params":{', b'"sampling_params":{"temperature":-1.0,'), "temperature must be"),
    ],
)
def test_a_bad_event_is_named(line: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(line)
