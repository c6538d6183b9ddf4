"""What observers see: one event when a step is scheduled, one when its tokens are back, and a full state to start from.

`SchedulerOutput` is a difference, so an observer that joins late or loses events cannot rebuild the state from it. Hence
every event carries absolute gauges, and an `EngineSnapshot` is sent on attach and after a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aioengine.core.scheduler_output import AdmissionStop, BlockChanges, SchedulerOutput, SchedulerStats
from aioengine.outputs import FinishReason
from aioengine.pooling_params import PoolingParams
from aioengine.sampling_params import SamplingParams

SCHEMA_VERSION = 5
"""1: until 0.1. 2: `approximate`. 3: the engine's totals, the last step in a snapshot, why admission stopped, the order of the free
queue, parent hashes, when masks were computed. 4: all that a recording needs to be run again: the calls of the scheduler in their
order, sampled tokens, prompts or else block hashes, what the engine ran on. 5: tables of several KV-cache groups, blocks that
a KV connector loads and keeps, requests for embeddings. Older lines lack fields that have a default."""

SchedulerCall = Literal["add", "finish", "reset", "reset_running", "schedule", "update", "ended", "loaded"]
"""A call of the scheduler: `add_request()` with the next of an event's `added`; `finish_requests()` with the next of its
`finished`, or "ended" where the scheduler ended that one itself in the update before; `reset_prefix_cache()`, "reset_running" with
`reset_running_requests=True`; `finish_load()` with the next of its `loaded`; `schedule()` and `update_from_output()`, of which each
event has one.
"""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request as it arrived. Times are seconds of `time.perf_counter()` in the engine's process."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_time: float
    priority: int = 0
    prompt: str | None = None  # this and the next two only where the user asked for text to be published
    prompt_token_ids: list[int] | None = None
    cache_salt: str | None = None
    sampling_params: SamplingParams | None = None  # None: a recording of before schema 4
    pooling_params: PoolingParams | None = None  # an embedding is wanted, and no token
    num_external_blocks: int = 0  # so many first blocks of the prompt the KV connector has
    num_block_hashes: int = 0  # it came with the hashes of so many blocks; the scheduler finds those of the others when it needs them
    lora_name: str | None = None  # of the adapter that its tokens go through
    lora_key: str | None = None  # names the adapter and its content


@dataclass(frozen=True, slots=True)
class FinishedInfo:
    """A request that ended, and why."""

    request_id: str
    finish_reason: FinishReason
    num_output_tokens: int
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class LoadedInfo:
    """What became of a `KVLoad`: so many of its blocks, from the first on, got their content."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Published when a step has been scheduled and handed to the executor, before its tokens are known."""

    step_id: int
    time: float  # seconds of time.perf_counter(), when schedule() returned
    output: SchedulerOutput
    stats: SchedulerStats
    admission_stop: AdmissionStop
    token_budget: int  # max_num_batched_tokens
    block_changes: BlockChanges
    queue_depth: int  # steps in flight, this one included
    schedule_start: float
    schedule_end: float
    added: list[RequestInfo] = field(default_factory=list)  # arrived since the previous event
    finished: list[FinishedInfo] = field(default_factory=list)  # ended since the previous event: aborts, mostly
    approximate: bool = False  # read back from a line: values that JSON has no form for were written in the nearest one
    stopped_req_id: str | None = None  # the waiting request at which admission stopped; None: the queue was empty
    num_blocks_needed: int = 0  # free blocks that it would take; 0 but for the admission stop "no_blocks"
    calls: list[SchedulerCall] = field(default_factory=list)  # since the previous event, in order; the last one is "schedule"
    # Shortened hashes of the full blocks that requests have come to since the previous event: what the prefix cache goes by.
    block_hashes: dict[str, list[str]] = field(default_factory=dict)
    loaded: list[LoadedInfo] = field(default_factory=list)  # since the previous event


@dataclass(frozen=True, slots=True)
class StepResultEvent:
    """Published when the tokens of a step have been taken in."""

    step_id: int
    time: float  # when update_from_output() returned
    num_new_tokens: dict[str, int]  # req_id -> tokens accepted; requests whose chunk yields none are absent
    stats: SchedulerStats
    block_changes: BlockChanges
    queue_depth: int  # steps still in flight
    # The lanes of the step timeline. Worker times are None when the executor does not report them.
    execute_start: float | None
    execute_end: float | None
    sample_start: float | None
    sample_end: float | None
    update_start: float
    update_end: float
    finished: list[FinishedInfo] = field(default_factory=list)
    added: list[RequestInfo] = field(default_factory=list)  # arrived since the previous event
    new_text: dict[str, str] = field(default_factory=dict)  # req_id -> text; only where the user asked for text to be published
    num_draft_tokens: int = 0  # draft tokens that this step checked
    num_accepted_tokens: int = 0  # those that were right
    approximate: bool = False  # as in a StepEvent
    grammar_start: float | None = None  # when the host computed the masks that this step sampled with; None: it needed none
    grammar_end: float | None = None
    calls: list[SchedulerCall] = field(default_factory=list)  # as in a StepEvent; one of them is "update"
    block_hashes: dict[str, list[str]] = field(default_factory=dict)  # as in a StepEvent
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)  # the worker's; only where text is published
    num_dropped_tokens: dict[str, int] = field(default_factory=dict)  # sampled behind the token that ended the request
    logprob_digests: dict[str, str] = field(default_factory=dict)  # of the worker's log-probabilities; only where text is published
    loaded: list[LoadedInfo] = field(default_factory=list)  # as in a StepEvent


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """One live request in an `EngineSnapshot`."""

    request_id: str
    status: str  # the name of its RequestStatus
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    max_tokens: int
    arrival_time: float
    num_preemptions: int
    priority: int
    block_ids: list[int]  # of the first KV-cache group; 0: a block that its window has left behind
    sampling_params: SamplingParams | None = None
    prompt: str | None = None  # these two only where the user asked for text to be published
    text: str | None = None
    recompute_until: int | None = None  # positions below this were computed before a preemption; None: not told (schema 2)
    scheduled_time: float | None = None  # of its first tokens; None: it has not run yet
    first_token_time: float | None = None  # None: it has no token yet
    other_block_ids: list[list[int]] = field(default_factory=list)  # of the other KV-cache groups, in order


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The full state between two events: what a late observer starts from."""

    step_id: int  # of the last scheduled step
    time: float
    stats: SchedulerStats
    requests: list[RequestSnapshot]
    cached_block_ids: list[int]  # blocks whose content the prefix cache can serve
    cached_block_hashes: list[str] = field(default_factory=list)  # the first hex digits, one for each of them
    # Ended requests that the worker has not forgotten yet -> the step in flight that tells it so; 0: none does yet.
    lingering: dict[str, int] = field(default_factory=dict)
    num_in_flight: int = 0  # steps
    paused: bool = False  # nothing is scheduled until the engine is resumed
    approximate: bool = False  # as in a StepEvent
    cached_parent_hashes: list[str] = field(default_factory=list)  # as in BlockChanges, one for each of cached_block_ids
    cached_block_groups: list[int] = field(default_factory=list)  # KV-cache groups, one for each of them; []: there is only one
    free_block_ids: list[int] = field(default_factory=list)  # in the order in which they will be taken
    last_step: StepEvent | None = None  # the one of step_id
    last_result: StepResultEvent | None = None  # the latest that came; of last_step, or of one before it


Event = StepEvent | StepResultEvent | EngineSnapshot
