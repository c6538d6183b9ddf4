"""Hypothesis strategies for every event type."""

from __future__ import annotations

from hypothesis import strategies as st

from aioengine.core.scheduler_output import (
    BlockChanges,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
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

sampling_params = st.builds(
    SamplingParams,
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
)
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
stats = st.builds(SchedulerStats, *[counts] * 13) | st.builds(SchedulerStats, *[counts] * 18)
block_changes = st.builds(
    BlockChanges, allocated=block_ids, freed=block_ids, evicted=block_ids, cached=block_ids, cached_hashes=st.lists(texts, max_size=2)
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
            sampling_params=st.none() | sampling_params,
            prompt=st.none() | texts,
            text=st.none() | texts,
        ),
        max_size=2,
    ),
    cached_block_ids=block_ids,
    cached_block_hashes=st.lists(texts, max_size=2),
    lingering=st.dictionaries(req_ids, counts, max_size=2),
    num_in_flight=st.integers(0, 4),
    paused=st.booleans(),
)
events: st.SearchStrategy[Event] = st.one_of(step_events, result_events, snapshots)
