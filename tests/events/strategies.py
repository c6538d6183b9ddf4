"""Hypothesis strategies for every event type."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from aioengine.core.scheduler_output import (
    BlockChanges,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from aioengine.errors import AioEngineError, InvalidRequestError
from aioengine.events.step_event import (
    EngineSnapshot,
    Event,
    FinishedInfo,
    RequestInfo,
    RequestSnapshot,
    StepEvent,
    StepResultEvent,
)
from aioengine.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

counts = st.integers(0, 2**40)
token_ids = st.lists(st.integers(0, 200_000), max_size=6)
block_ids = st.lists(st.integers(0, 5000), max_size=4)
block_tables = st.lists(block_ids, min_size=1, max_size=2).map(tuple)
times = st.floats(0, 1e9)
# No surrogates: such text has no UTF-8 form, and a tokenizer refuses it too.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
req_ids = texts
id_sets = st.frozensets(req_ids, max_size=3)


def _params_or_none(**fields: Any) -> SamplingParams | None:
    try:
        return SamplingParams(**fields)
    except InvalidRequestError:  # together they may leave no token
        return None


sampling_params = st.builds(
    _params_or_none,
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(100, 1000),
    min_tokens=st.integers(0, 100),
    stop=st.lists(texts.filter(bool), max_size=2).map(tuple),
    stop_token_ids=token_ids.map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 4),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 200_000), min_size=1, max_size=3),
    bad_words=st.lists(texts.filter(bool), max_size=2),
    bad_words_token_ids=st.lists(token_ids.map(tuple), max_size=2).map(tuple),
    output_kind=st.sampled_from(RequestOutputKind),
    structured_outputs=st.none()
    | st.builds(StructuredOutputsParams, regex=texts.filter(bool))
    | st.builds(StructuredOutputsParams, json=st.just({"type": "object"}))
    | st.builds(StructuredOutputsParams, choice=st.lists(texts.filter(bool), min_size=1, max_size=2)),
    repetition_detection=st.none() | st.builds(RepetitionDetectionParams, st.integers(4, 1024), st.integers(0, 4), st.integers(2, 65536)),
).filter(lambda params: params is not None)
any_texts = st.text(st.characters(), max_size=8)  # half surrogate pairs, NUL and control characters too
any_ints = st.integers() | st.sampled_from([2**63, 2**64, -(2**70), 10**30, 10**400])
any_json = st.recursive(
    st.none() | st.booleans() | any_ints | st.floats() | any_texts | st.binary(max_size=2) | st.decimals() | st.fractions(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(any_texts, max_size=2)
        | st.dictionaries(any_texts | any_ints | st.booleans() | st.none() | st.tuples(any_ints), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def accepted_params(draw: st.DrawFn) -> SamplingParams:
    """What `SamplingParams` itself takes of values that are not chosen to be sensible."""
    tokens = st.lists(any_ints | st.integers(0, 100), max_size=3)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.floats() | any_ints,
        "top_p": st.floats(0, 1),
        "top_k": any_ints,
        "min_p": st.floats(0, 1),
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": any_ints,
        "stop": any_texts | st.lists(any_texts, max_size=2),
        "stop_token_ids": tokens,
        "allowed_token_ids": tokens,
        "bad_words": st.lists(any_texts, max_size=2),
        "bad_words_token_ids": st.lists(tokens, max_size=2),
        "logit_bias": st.dictionaries(any_ints, st.floats() | any_ints, max_size=2),
        "truncate_prompt_tokens": any_ints,
        "structured_outputs": st.dictionaries(any_texts | any_ints, any_json, max_size=2).map(lambda json: {"json": json})
        | st.fixed_dictionaries({"regex": any_texts})
        | st.fixed_dictionaries({"choice": st.lists(any_texts, max_size=2)}),
    }
    taken: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)):
        value = draw(fields[name])
        try:
            taken[name] = StructuredOutputsParams(**value) if name == "structured_outputs" else value
            SamplingParams(**taken)
        except (AioEngineError, OverflowError):
            taken.pop(name, None)
    return SamplingParams(**taken)


new_requests = st.builds(
    NewRequestData,
    req_id=req_ids,
    prompt_token_ids=token_ids,
    sampling_params=sampling_params,
    block_ids=block_tables,
    num_computed_tokens=counts,
)
cached_requests = st.builds(
    CachedRequestData,
    req_ids=st.lists(req_ids, max_size=3),
    resumed_req_ids=id_sets,
    all_token_ids=st.dictionaries(req_ids, token_ids, max_size=2),
    new_block_ids=st.lists(st.none() | block_tables, max_size=3),
    num_computed_tokens=st.lists(counts, max_size=3),
    num_output_tokens=st.lists(counts, max_size=3),
)
scheduler_outputs = st.builds(
    SchedulerOutput,
    step_id=counts,
    scheduled_new_reqs=st.lists(new_requests, max_size=2),
    scheduled_cached_reqs=cached_requests,
    num_scheduled_tokens=st.dictionaries(req_ids, st.integers(1, 512), max_size=3),
    total_num_scheduled_tokens=counts,
    finished_req_ids=id_sets,
    preempted_req_ids=id_sets,
    structured_output_request_ids=id_sets,
    new_block_ids_to_zero=block_ids,
    scheduled_spec_decode_tokens=st.dictionaries(req_ids, token_ids, max_size=2),
)
stats = st.builds(SchedulerStats, *[counts] * 13) | st.builds(SchedulerStats, *[counts] * 18) | st.builds(SchedulerStats, *[counts] * 25)
block_changes = st.builds(
    BlockChanges,
    allocated=block_ids,
    freed=block_ids,
    evicted=block_ids,
    cached=block_ids,
    cached_hashes=st.lists(texts, max_size=2),
    cached_parent_hashes=st.lists(texts, max_size=2),
    freed_after=block_ids,
    freed_to_front=st.lists(st.booleans(), max_size=2),
)
finished = st.lists(
    st.builds(
        FinishedInfo,
        request_id=req_ids,
        finish_reason=st.sampled_from(["stop", "length", "abort", "error", "repetition"]),
        num_output_tokens=counts,
        stop_reason=st.none() | counts | texts,
    ),
    max_size=2,
)
request_infos = st.builds(
    RequestInfo,
    request_id=req_ids,
    num_prompt_tokens=counts,
    max_tokens=counts,
    arrival_time=times,
    priority=st.integers(-100, 100),
    prompt=st.none() | texts,
)
step_events = st.builds(
    StepEvent,
    step_id=counts,
    time=times,
    output=scheduler_outputs,
    stats=stats,
    admission_stop=st.sampled_from(["queue_empty", "budget", "max_num_seqs", "no_blocks", "preempted", "in_flight"]),
    token_budget=counts,
    block_changes=block_changes,
    queue_depth=st.integers(0, 4),
    schedule_start=times,
    schedule_end=times,
    added=st.lists(request_infos, max_size=2),
    finished=finished,
    stopped_req_id=st.none() | req_ids,
    num_blocks_needed=counts,
)
result_events = st.builds(
    StepResultEvent,
    step_id=counts,
    time=times,
    num_new_tokens=st.dictionaries(req_ids, counts, max_size=3),
    stats=stats,
    block_changes=block_changes,
    queue_depth=st.integers(0, 4),
    execute_start=st.none() | times,
    execute_end=st.none() | times,
    sample_start=st.none() | times,
    sample_end=st.none() | times,
    update_start=times,
    update_end=times,
    finished=finished,
    added=st.lists(request_infos, max_size=2),
    new_text=st.dictionaries(req_ids, texts, max_size=2),
    num_draft_tokens=counts,
    num_accepted_tokens=counts,
    grammar_start=st.none() | times,
    grammar_end=st.none() | times,
)
snapshots = st.builds(
    EngineSnapshot,
    step_id=counts,
    time=times,
    stats=stats,
    requests=st.lists(
        st.builds(
            RequestSnapshot,
            request_id=req_ids,
            status=st.sampled_from(["WAITING", "RUNNING", "PREEMPTED"]),
            num_prompt_tokens=counts,
            num_output_tokens=counts,
            num_computed_tokens=counts,
            num_cached_tokens=st.integers(-1, 1000),
            max_tokens=counts,
            arrival_time=times,
            num_preemptions=counts,
            priority=st.integers(-100, 100),
            block_ids=block_ids,
            other_block_ids=st.lists(block_ids, max_size=2),
            sampling_params=st.none() | sampling_params,
            prompt=st.none() | texts,
            text=st.none() | texts,
            recompute_until=st.none() | counts,
            scheduled_time=st.none() | times,
            first_token_time=st.none() | times,
        ),
        max_size=2,
    ),
    cached_block_ids=block_ids,
    cached_block_hashes=st.lists(texts, max_size=2),
    cached_parent_hashes=st.lists(texts, max_size=2),
    free_block_ids=block_ids,
    last_step=st.none() | step_events,
    last_result=st.none() | result_events,
    lingering=st.dictionaries(req_ids, counts, max_size=2),
    num_in_flight=st.integers(0, 4),
    paused=st.booleans(),
)
events: st.SearchStrategy[Event] = st.one_of(step_events, result_events, snapshots)

# Events of requests as they may be accepted at most: what no check at the door has refused.
_any_new = st.builds(NewRequestData, any_texts, token_ids, accepted_params(), block_tables, counts)
_any_added = st.lists(st.builds(RequestInfo, any_texts, counts, any_ints, times, any_ints, st.none() | any_texts), max_size=2)
_any_finished = st.lists(
    st.builds(FinishedInfo, any_texts, st.sampled_from(["stop", "error"]), counts, st.none() | any_ints | any_texts), max_size=2
)
_any_outputs = st.builds(
    SchedulerOutput,
    counts,
    st.lists(_any_new, max_size=2),
    st.builds(CachedRequestData, all_token_ids=st.dictionaries(any_texts, token_ids, max_size=1)),
    st.dictionaries(any_texts, counts, max_size=2),
    counts,
    finished_req_ids=st.frozensets(any_texts, max_size=2),
)
_few_blocks = st.just(SchedulerStats(1, 2, 0, 10, 5, 1, 0, 0, 0))
_no_blocks = BlockChanges()
accepted_events: st.SearchStrategy[Event] = st.one_of(
    st.builds(
        StepEvent, counts, times, _any_outputs, _few_blocks, st.just("budget"), counts, st.just(_no_blocks), st.just(1), times, times,
        added=_any_added, finished=_any_finished,
    ),
    st.builds(
        StepResultEvent, counts, times, st.dictionaries(any_texts, counts, max_size=2), _few_blocks, st.just(_no_blocks), st.just(1),
        times, times, times, times, times, times,
        added=_any_added, finished=_any_finished, new_text=st.dictionaries(any_texts, any_texts, max_size=2),
    ),
    st.builds(
        EngineSnapshot, counts, times, _few_blocks,
        st.lists(
            st.builds(
                RequestSnapshot, any_texts, st.just("RUNNING"), counts, counts, counts, counts, any_ints, times, counts, any_ints,
                block_ids, accepted_params(), st.none() | any_texts, st.none() | any_texts,
            ),
            max_size=2,
        ),
        block_ids,
    ),
)  # fmt: skip
