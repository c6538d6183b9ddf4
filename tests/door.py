"""Extreme values for everything a caller passes, and the one question to ask of each: refused in words, or harmless?"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping
from contextlib import aclosing
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from aioengine import AioEngineError, AsyncEngine, SamplingParams
from aioengine.events.step_event import EngineSnapshot, Event, RequestInfo, StepEvent, StepResultEvent
from aioengine.events.wire import decode, encode
from aioengine.sampling_params import RequestOutputKind, StructuredOutputsParams

MATE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MATE_PROMPT = [5, 6, 7]


class Hostile:
    """Raises wherever it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def __len__(self) -> int:
        raise RuntimeError("no length")


NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 7, 64, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, -(2**63), -(2**70)),
    *(10**30, 10**400, -(10**400), 10**5000, 0.0, -0.0, 0.5, 1.0, 2.0, 5e-324, 1e-320, 1e-40, 1e-7, 1e-5, 1e30, 1e39, 1e308),
    *(float("inf"), float("-inf"), float("nan"), True, False, np.int64(3), np.uint8(3), np.int32(-1), np.uint64(2**64 - 1)),
    *(np.float32(0.5), np.float64(0.25), np.float16(1.0), np.float32("nan"), np.float64("inf"), np.longdouble("1e400"), np.bool_(True)),
    *(np.array(1), np.array(0.5), np.array([1]), Fraction(1, 2), Fraction(10**400), Decimal("0.5"), 1 + 2j),
]
TEXTS: list[Any] = [
    "",
    "a",
    "ab",
    "\0",
    "\ud800",
    "a\udc00b",
    "\udbff\udfff",
    "x" * 5000,
    " ",
    "<eos>",
    "\x1b[31m",
    np.str_("a"),
    b"",
    b"ab",
]
LISTS: list[Any] = [
    *((), [], {}, set(), {1, 2}, frozenset({"b", "a"}), {"a", 1}, [1], [1, 1], [0.5], ["a"], ["a", "b"], ["\ud800"], [""], [None]),
    *([[1]], [[1, 2], [3]], [[]], [[-1]], [[2**70]], [2**70], [-1], [10**5000], [True], [1] * 100, range(5), range(10**9), {"a": [1]}),
    *({1: 1.0}, {1: 100.0, 2: -100.0}, {"1": 1.0}, {1: float("nan")}, {1: 10**400}, {10**400: 1.0}, {-1: 1.0}, {1: None}, {True: 1.0}),
    *({"type": "object"}, {1: 2}, {"a": "\ud800"}, {"\ud800": 1}, {"a": 2**70}, {"a": {1, 2}}, {"x": 10**400}, {(1, 2): 3}),
    *(np.array([1, 2]), np.array([[1, 2]]), np.array([0.5]), np.array([]), np.array(["a"]), {np.int64(1): np.float32(0.5)}),
    *(memoryview(b"ab"), bytearray(b"ab"), Hostile(), object(), int, len, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, "DELTA"),
]


def _itself() -> Any:
    value: dict[str, Any] = {}
    value["self"] = [value, value]
    return value


FRESH: list[Any] = [lambda: iter([1, 2]), lambda: (text for text in "ab"), itertools.count, lambda: itertools.repeat("a"), _itself]
extremes = st.one_of(
    st.none(),
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(LISTS),
    st.sampled_from(FRESH).map(lambda make: make()),
    st.integers(-3, 300),
    st.floats(),
    st.text(st.characters(), max_size=4),
    st.lists(st.integers(-1, 300), max_size=4),
    st.lists(st.text(st.characters(), max_size=3), max_size=3),
    st.dictionaries(st.integers(0, 300), st.floats(-120, 120), max_size=3),
)
PARAM_FIELDS = [f.name for f in dataclasses.fields(SamplingParams)]
STRUCTURED_FIELDS = [f.name for f in dataclasses.fields(StructuredOutputsParams)]
OPTIONS = ["prompt", "sampling_params", "request_id", "priority", "cache_salt", "timeout"]
params_fields = st.dictionaries(st.sampled_from(PARAM_FIELDS), extremes, max_size=3)
structured_fields = st.none() | st.dictionaries(st.sampled_from(STRUCTURED_FIELDS), extremes, min_size=1, max_size=2)
request_options = st.dictionaries(st.sampled_from(OPTIONS), extremes, max_size=2)


def make_params(fields: Mapping[str, Any], structured: Mapping[str, Any] | None) -> SamplingParams | None:
    """None: refused, by an error that names what is wrong and stays short."""
    given = dict(fields)
    try:
        if structured is not None:
            given["structured_outputs"] = StructuredOutputsParams(**structured)
        return SamplingParams(**given)
    except AioEngineError as exc:
        check_message(exc, [*fields, *(structured or {})])
        return None


def check_message(error: AioEngineError, names: list[str]) -> None:
    check_length(error)
    message = str(error)
    assert any(name in message for name in names) or "no token is left" in message or "structured_outputs needs exactly one" in message


def check_length(error: AioEngineError) -> None:
    assert len(str(error)) < 2000, "a message that nobody can read"
    str(error).encode()


async def check_request(engine: AsyncEngine, params: SamplingParams, options: Mapping[str, Any], expected: list[int]) -> bool:
    """Run a request beside a mate: it ends in one of the known ways, the mate gets `expected`, and every event is written and read.

    Returns whether it ran.
    """
    events: list[Event] = []
    engine.bus.add_observer(events.append)
    try:
        async with aclosing(engine.generate(MATE_PROMPT, MATE)) as mate:
            await anext(mate)
            ran = await _run(engine, params, options)
            outputs = [output async for output in mate]
        engine.check_health()
        assert outputs[-1].token_ids == expected, "the mate has other tokens"
    finally:
        engine.bus.remove_observer(events.append)
    assert events
    for event in events:
        assert decode(encode(event, include_prompts=True)) == _without_extra_args(event)
    return ran


async def _run(engine: AsyncEngine, params: SamplingParams, options: Mapping[str, Any]) -> bool:
    given = {"prompt": [9, 8], "sampling_params": params, **options}
    prompt = given.pop("prompt")
    try:
        async with asyncio.timeout(60), aclosing(engine.generate(prompt, **given)) as stream:
            last = [output async for output in stream][-1]
    except AioEngineError as exc:
        check_length(exc)
        return False
    assert last.finished
    for completion in last.outputs:
        assert completion.finish_reason in ("stop", "length", "error")
        assert completion.error is None or not any(word in completion.error for word in ("Overflow", "cannot be run", "could be sampled:"))
        completion.text.encode()
    return True


def _without_extra_args(event: Event) -> Event:
    """Which do not travel."""
    if isinstance(event, StepEvent | StepResultEvent):
        event = dataclasses.replace(event, added=[_plain_request(request) for request in event.added])
    match event:
        case StepEvent():
            output = event.output
            new = [dataclasses.replace(r, sampling_params=_plain(r.sampling_params)) for r in output.scheduled_new_reqs]
            return dataclasses.replace(event, output=dataclasses.replace(output, scheduled_new_reqs=new))
        case EngineSnapshot():
            requests = [dataclasses.replace(r, sampling_params=r.sampling_params and _plain(r.sampling_params)) for r in event.requests]
            return dataclasses.replace(event, requests=requests)
        case _:
            return event


def _plain_request(request: RequestInfo) -> RequestInfo:
    return dataclasses.replace(request, sampling_params=request.sampling_params and _plain(request.sampling_params))


def _plain(params: SamplingParams) -> SamplingParams:
    return params.with_values(extra_args={})


class Rig:
    """An engine in a loop of its own, for tests that are not coroutines."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.runner = asyncio.Runner()
        self.engine = engine
        self.num_ran = 0
        self.runner.run(engine.start())
        self.expected = self.runner.run(engine.generate_batch([MATE_PROMPT], MATE, progress=False))[0].token_ids

    def check(self, params: SamplingParams, options: Mapping[str, Any]) -> bool:
        """See `check_request`."""
        ran = self.runner.run(check_request(self.engine, params, options, self.expected))
        self.num_ran += ran
        return ran

    def close(self) -> None:
        self.runner.run(self.engine.shutdown())
        self.runner.close()


def is_small(fields: Mapping[str, Any]) -> bool:
    """A thousand continuations are allowed, and would take minutes in a test."""
    n = fields.get("n", 1)
    return not isinstance(n, int) or not 8 < n <= 1024
