"""The door: whatever is passed is refused in words that name it, or it runs, harms nobody, and its events can be written."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aioengine import AioEngineError, AsyncEngine, InvalidRequestError, SamplingParams
from aioengine.engine.inputs.input_processor import InputProcessor
from aioengine.engine.inputs.parallel_sampling import child_params
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.testing import FakeExecutor, FakeTokenizer, make_model_info
from aioengine.worker.sample.row import check_edit_widths, params_row
from tests import door


@pytest.fixture(scope="module")
def rig() -> Iterator[door.Rig]:
    executor = FakeExecutor(num_blocks=257, block_size=4, max_num_seqs=8)
    engine = AsyncEngine(
        executor=executor, tokenizer=FakeTokenizer(), max_num_seqs=8, block_size=4, max_model_len=48, check_invariants=True, seed=0
    )
    rig = door.Rig(engine)
    yield rig
    rig.close()
    assert rig.num_ran > 0


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=door.params_fields.filter(door.is_small), structured=door.structured_fields, options=door.request_options)
@example(fields={"top_k": 2**63}, structured=None, options={})
@example(fields={"top_k": 2**31 - 1, "temperature": 1e6, "min_p": 5e-324, "top_p": 5e-324}, structured=None, options={})
@example(fields={"temperature": 1e39, "allowed_token_ids": [5]}, structured=None, options={})
@example(fields={"stop": "\ud800"}, structured=None, options={})
@example(fields={}, structured={"json": {1: 2}}, options={"priority": 2**70})
@example(fields={}, structured={"json": '{"const": "\\ud800"}'}, options={})
@example(fields={"extra_args": {1: 2}}, structured=None, options={"priority": -(2**63)})
@example(fields={}, structured=None, options={"timeout": 10**400})
def test_every_request_is_refused_or_harms_nobody(
    rig: door.Rig, fields: dict[str, Any], structured: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    params = door.make_params(fields, structured)
    if params is not None:
        rig.check(params, options)


@settings(max_examples=250, deadline=None)
@given(name=st.sampled_from(door.PARAM_FIELDS), value=door.extremes)
def test_every_field_by_itself_is_refused_by_its_name_or_accepted(name: str, value: Any) -> None:
    params = door.make_params({name: value}, None)
    if params is not None:
        hash(params)
        assert SamplingParams(**{name: getattr(params, name)}) == params, "what was read is read again"
        seeded = params.with_values(seed=0 if params.seed is None else params.seed)
        params_row(seeded)
        check_edit_widths(seeded)


@settings(max_examples=40, deadline=None)
@given(prompts=door.extremes, sampling_params=door.extremes)
def test_a_batch_of_anything_is_refused_or_runs(rig: door.Rig, prompts: Any, sampling_params: Any) -> None:
    async def run() -> None:
        try:
            await asyncio.wait_for(rig.engine.generate_batch(prompts, sampling_params, progress=False), 60)
        except AioEngineError as exc:
            door.check_length(exc)

    rig.runner.run(run())
    rig.check(SamplingParams(max_tokens=1), {})


# ---------------------------------------------------------------------------------------------------- behind the door
async def test_what_fits_no_table_ends_its_request_also_where_no_model_runs(start_rig: Any) -> None:
    """The fake worker has tables of the real one's widths, or a test on it would not notice."""
    async with start_rig() as rig:
        wide = SamplingParams(max_tokens=4).with_values(top_k=2**63)
        (expected,) = await rig.engine.generate_batch([[1, 2]], door.MATE)
        outputs = await rig.engine.generate_batch([[1, 2], [3]], [door.MATE, wide])
        assert outputs[0].token_ids == expected.token_ids
        assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
        assert "top_k does not fit" in (outputs[1].outputs[0].error or "")
        await rig.settle()


async def test_long_lists_are_validated_once_and_checked_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    info = make_model_info(vocab_size=50_000)
    processor = InputProcessor(info, FakeTokenizer(), max_model_len=100, max_tokens_limit=lambda n: 9, seed=3)
    params = SamplingParams(logit_bias=dict.fromkeys(range(40_000), 1.0), allowed_token_ids=range(40_000), bad_words=["x"], n=3)
    monkeypatch.setattr("aioengine.checks.fields.biases", None)  # nobody calls it again
    monkeypatch.setattr("aioengine.checks.fields.token_ids", None)
    turns: list[int] = []

    async def count_turns() -> None:
        while True:
            turns.append(len(turns))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    processed = await processor.process([1], params)
    counting.cancel()
    assert len(turns) >= 8, "the loop had no turn between"
    children = child_params(processed.sampling_params)
    assert [child.logit_bias is params.logit_bias for child in children] == [True] * 3


class CannotDecode(FakeTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if 7 in token_ids:
            raise ValueError("cannot decode this")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


async def test_a_prompt_whose_end_cannot_be_decoded_is_refused_and_its_name_is_free(start_rig: Any) -> None:
    async with start_rig(tokenizer=CannotDecode()) as rig:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="ValueError: cannot decode this"):
                await anext(rig.engine.generate([7], door.MATE, request_id="r"))
        assert [output async for output in rig.engine.generate([8], door.MATE, request_id="r")][-1].finished
        await rig.settle()


async def test_a_grammar_and_allowed_tokens_that_never_meet_are_refused(start_rig: Any) -> None:
    regex = StructuredOutputsParams(regex="a+b")
    async with start_rig() as rig:
        for options in ({"allowed_token_ids": [98]}, {"bad_words_token_ids": [[97]]}):
            with pytest.raises(InvalidRequestError, match="no token is left to sample: structured_outputs"):
                await anext(rig.engine.generate([1], SamplingParams(structured_outputs=regex, **options)))
        params = SamplingParams(structured_outputs=regex, allowed_token_ids=[97, 98], temperature=0, max_tokens=3)
        assert [output async for output in rig.engine.generate([1], params)][-1].finish_reason != "error"


async def test_numbers_of_numpy_are_plain_ones(start_rig: Any) -> None:
    async with start_rig() as rig:
        given: dict[str, Any] = {"temperature": np.float32(0), "max_tokens": np.int64(3), "ignore_eos": np.bool_(True)}
        given["stop_token_ids"] = np.array([5, 6])
        params = SamplingParams(**given)
        assert [type(value) for value in (params.temperature, params.max_tokens, params.ignore_eos)] == [float, int, bool]
        assert params.stop_token_ids == (5, 6)
        outputs = [o async for o in rig.engine.generate([1], params, priority=np.int8(3), timeout=np.float64(9), request_id=np.str_("r"))]
        assert len(outputs[-1].token_ids) == 3
        assert type(outputs[-1].request_id) is str
