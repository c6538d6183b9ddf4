"""Why: what it says of a waiting request is what the scheduler's own books say, and its advice makes the named cause shrink."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from aioengine.core.scheduler import Scheduler
from aioengine.events.recording.reader import read_recording
from aioengine.events.recording.writer import StepRecorder
from aioengine.events.sources.base import StreamItem
from aioengine.events.step_event import StepEvent, StepResultEvent
from aioengine.request import RequestStatus
from aioengine_tui.model.state import DashboardState
from aioengine_tui.model.state_json import state_to_json
from aioengine_tui.model.why.advice import Advice, Cause, Finding, advise
from aioengine_tui.model.why.slow import slowest_token, step_company, usual_duration
from aioengine_tui.model.why.waiting import WhyWaiting, why_waiting
from aioengine_tui.model.why.words import advice_line, company_words, remedy_words, request_words, slow_words, step_words, waiting_words
from tests.tui.runs import make_run
from tests.tui.support import busy_state
from tests.tui.workloads import Arrival, Settings, WorkloadEngine, fold_all, made_up_prompt, run_workload, workload_of


# ---------------------------------------------------------------------------------------------------- the advice helps
def crowd(num: int, *, every_s: float, prompt: int, max_tokens: int) -> list[Arrival]:
    return [Arrival(f"load-{i}", i * every_s, made_up_prompt(i, prompt), max_tokens) for i in range(num)]


def chats_and_long_prompts() -> list[Arrival]:
    chats = [Arrival(f"chat-{i}", 0.0, made_up_prompt(i, 10), 200) for i in range(6)]
    return chats + [Arrival(f"long-{i}", 0.1 + i * 0.5, made_up_prompt(100 + i, 600), 4) for i in range(8)]


def chats_and_many_short_prompts() -> list[Arrival]:
    chats = [Arrival(f"chat-{i}", 0.0, made_up_prompt(i, 10), 200) for i in range(4)]
    bursts = [Arrival(f"b{i}-{j}", 0.1 + i * 0.8, made_up_prompt(100 + 10 * i + j, 60), 2) for i in range(5) for j in range(9)]
    return chats + bursts


CASES: dict[str, tuple[list[Arrival], Settings, Cause, str]] = {
    "budget": (
        crowd(60, every_s=0.04, prompt=40, max_tokens=8),
        Settings(num_kv_cache_blocks=3000, max_num_seqs=200, max_num_batched_tokens=16),
        "budget",
        "max_num_batched_tokens",
    ),
    "seqs": (crowd(40, every_s=0.03, prompt=12, max_tokens=30), Settings(max_num_seqs=8), "max_num_seqs", "max_num_seqs"),
    "blocks": (
        crowd(40, every_s=0.04, prompt=24, max_tokens=60),
        Settings(num_kv_cache_blocks=100, max_num_seqs=64),
        "no_blocks",
        "num_kv_cache_blocks",
    ),
    "long prompts": (
        chats_and_long_prompts(),
        Settings(num_kv_cache_blocks=2000, max_num_batched_tokens=512),
        "long_prompts",
        "long_prefill_token_threshold",
    ),
    "many prompts": (
        chats_and_many_short_prompts(),
        Settings(num_kv_cache_blocks=2000, max_num_seqs=64, max_num_batched_tokens=512),
        "long_prompts",
        "max_num_batched_tokens",
    ),
}


def record(items: list[StreamItem], path: Path) -> list[StreamItem]:
    """Through a recording's file: what comes back is all that the advisor and the second run know."""
    header, *rest = items
    with StepRecorder(path, header) as recorder:  # type: ignore[arg-type]
        for item in rest:
            if isinstance(item, StepEvent | StepResultEvent):
                recorder(item)
    recording = read_recording(path)
    return [recording.header, *recording.events]


def advice_of(items: list[StreamItem]) -> Advice:
    advice = advise(fold_all(items))
    assert advice is not None
    return advice


def finding_of(advice: Advice, cause: Cause) -> Finding | None:
    return next((finding for finding in advice.findings if finding.cause == cause), None)


@pytest.mark.parametrize("name", CASES)
def test_the_named_cause_shrinks_when_the_recorded_workload_runs_with_the_named_setting(name: str, tmp_path: Path) -> None:
    arrivals, settings, cause, setting = CASES[name]
    recorded = record(run_workload(arrivals, settings), tmp_path / "run.jsonl")
    before = advice_of(recorded)
    finding = before.findings[0]
    assert (finding.cause, finding.setting) == (cause, setting)
    assert finding.proposed is not None
    assert setting in (advice_line(fold_all(recorded)) or "")
    again = workload_of(recorded)
    assert {(a.request_id, a.prompt, a.max_tokens) for a in again} == {(a.request_id, a.prompt, a.max_tokens) for a in arrivals}
    # The run itself is repeated exactly from its recording.
    same = advice_of(run_workload(again, settings))
    assert same == before
    after = advice_of(run_workload(again, settings.changed(setting, finding.proposed)))
    left = finding_of(after, cause)
    assert left is None or left.share < 0.6 * finding.share, f"{finding.share} became {left}"
    if cause == "no_blocks":
        assert before.num_preemptions > 0
        assert after.num_preemptions < 0.5 * before.num_preemptions
        assert after.num_recomputed_tokens < 0.5 * before.num_recomputed_tokens


def test_the_other_way_out_of_thrashing_helps_too(tmp_path: Path) -> None:
    arrivals, settings, _, _ = CASES["blocks"]
    before = advice_of(run_workload(arrivals, settings))
    words = before.findings[0].otherwise
    assert words.startswith(f"or lower max_num_seqs ({settings.max_num_seqs}) to ")
    after = advice_of(run_workload(arrivals, settings.changed("max_num_seqs", int(words.split()[-1]))))
    assert after.num_preemptions < 0.5 * before.num_preemptions


def test_an_engine_with_room_for_all_is_told_so() -> None:
    state = fold_all(run_workload(crowd(3, every_s=0.0, prompt=4, max_tokens=40), Settings()))
    advice = advise(state)
    assert advice is not None
    assert advice.findings == ()
    assert (advice_line(state) or "").startswith("nothing stands in the way")


def test_before_the_first_steps_there_is_no_advice() -> None:
    assert advise(DashboardState()) is None
    assert advice_line(DashboardState()) is None
    assert state_to_json(DashboardState())["why"] == {"advice": None, "waiting": [], "slow_steps": []}


# ---------------------------------------------------------------------------------------------------- the scheduler's own books
def random_workload(seed: int) -> tuple[list[Arrival], Settings]:
    rng = random.Random(seed)
    arrivals = [
        Arrival(f"r{i}", rng.random() * 0.8, made_up_prompt(i, rng.randint(1, 60)), rng.randint(1, 40), rng.randint(0, 2))
        for i in range(30)
    ]
    options = {"enable_chunked_prefill": rng.random() < 0.7, "long_prefill_token_threshold": rng.choice([0, 0, 7])}
    # Without chunks a step has to hold a whole request, so the engine asks for such a budget.
    budget = rng.randint(61, 90) if options["enable_chunked_prefill"] else 128
    settings = Settings(rng.randint(27, 70), max_num_seqs=rng.randint(2, 9), max_num_batched_tokens=budget, options=options)
    return arrivals, settings


def admitted_after_the_end_of(scheduler: Scheduler, request_ids: tuple[str, ...], wanted: str) -> bool:
    """Whether, on a copy of the scheduler, the next steps admit `wanted` before anybody else has ended.

    A step has a token budget, which Why does not promise anything about: where that is what stops, the next step goes on.
    """
    twin = copy.deepcopy(scheduler)
    twin.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
    output = twin.schedule()
    return output is not None and (wanted in output.num_scheduled_tokens or twin.admission_stop == "budget")


@pytest.mark.parametrize("seed", range(6))
def test_why_names_what_the_schedulers_own_books_say(seed: int) -> None:
    state = DashboardState()
    seen: list[WhyWaiting] = []
    rng = random.Random(seed)

    def check(engine: WorkloadEngine, events: list[StreamItem]) -> None:
        for event in events:
            state.apply(event)
        scheduler = engine.scheduler
        kv = scheduler.kv_cache_manager
        books = [request.request_id for request in scheduler.waiting if request.request_id in state.requests]
        for place, request_id in enumerate(books, 1):
            why = why_waiting(state, request_id)
            assert why is not None
            assert (why.place, why.num_waiting) == (place, len(books))
            assert list(why.before) == books[: place - 1]
            assert why.num_blocks_needed == kv.num_blocks_for(scheduler.requests[request_id].num_tokens)
            assert why.num_free_blocks == kv.block_pool.num_free_blocks
            assert why.num_running == len(scheduler.running)
            assert why.max_num_seqs == scheduler.config.max_num_seqs
            tables = {request.request_id: request.block_ids[0] for request in scheduler.running}
            assert {holder.request_id: holder.num_blocks for holder in why.holders} == {name: len(table) for name, table in tables.items()}
            ref_cnt = kv.block_pool.ref_cnt
            assert all(holder.num_own_blocks == sum(ref_cnt[b] == 1 for b in tables[holder.request_id]) for holder in why.holders)
            last_event = events[-2] if len(events) > 1 else None
            if isinstance(last_event, StepEvent) and last_event.admission_stop != "queue_empty" and why.cause != "new":
                assert why.cause == last_event.admission_stop
            seen.append(why)
        if books and rng.random() < 0.3:
            check_who_must_end(scheduler, rng.choice(books))

    def check_who_must_end(scheduler: Scheduler, request_id: str) -> None:
        why = why_waiting(state, request_id)
        assert why is not None
        ends = why.must_end + why.before[: why.num_before_must_end]
        assert admitted_after_the_end_of(scheduler, ends, request_id), waiting_words(why)
        if ends:  # all but the last are too few
            twin = copy.deepcopy(scheduler)
            twin.finish_requests(ends[:-1], RequestStatus.FINISHED_ABORTED)
            output = twin.schedule()
            assert output is None or request_id not in output.num_scheduled_tokens, waiting_words(why)

    arrivals, settings = random_workload(seed)
    engine_header = WorkloadEngine(settings)
    state.apply(engine_header.header)
    engine_header.executor.shutdown()
    run_workload(arrivals, settings, each_step=check, enable_prefix_caching=False)
    assert {why.cause for why in seen} & {"no_blocks", "max_num_seqs", "preempted"}
    assert any(why.must_end for why in seen)


def test_places_follow_the_policy() -> None:
    settings = Settings(max_num_seqs=1, options={"policy": "priority"})
    engine = WorkloadEngine(settings)
    state = DashboardState()
    state.apply(engine.header)
    engine.add("first", num_prompt_tokens=4, max_tokens=30)
    for item in engine.run(2):
        state.apply(item)
    state.requests["first"].priority = 0
    for name, priority in (("late", 2), ("urgent", 1)):
        engine.add_with_priority(name, priority, num_prompt_tokens=4, max_tokens=4)
    for item in engine.run(1):
        state.apply(item)
    engine.executor.shutdown()
    books = [request.request_id for request in engine.scheduler.waiting]
    assert books == ["urgent", "late"]
    whys = [why for name in books if (why := why_waiting(state, name)) is not None]
    assert [why.place for why in whys] == [1, 2]
    assert whys[1].before == ("urgent",)


def test_a_shared_block_is_given_back_by_the_last_of_its_holders_only() -> None:
    shared = made_up_prompt(1, 40)
    arrivals = [Arrival(f"twin-{i}", 0.0, shared, 60) for i in range(2)] + [Arrival("large", 0.3, made_up_prompt(9, 48), 4)]
    state = DashboardState()
    checked: list[WhyWaiting] = []

    def check(engine: WorkloadEngine, events: list[StreamItem]) -> None:
        for event in events:
            state.apply(event)
        why = why_waiting(state, "large")
        if why is not None and why.num_running == 2:
            assert all(holder.num_own_blocks <= holder.num_blocks - 9 for holder in why.holders)
            twin = copy.deepcopy(engine.scheduler)
            twin.finish_requests(why.must_end[:-1], RequestStatus.FINISHED_ABORTED)
            output = twin.schedule()
            assert output is None or "large" not in output.num_scheduled_tokens
            assert admitted_after_the_end_of(engine.scheduler, why.must_end, "large")
            checked.append(why)

    settings = Settings(num_kv_cache_blocks=27)
    engine = WorkloadEngine(settings)
    state.apply(engine.header)
    engine.executor.shutdown()
    run_workload(arrivals, settings, each_step=check)
    assert {len(why.must_end) for why in checked} & {2}, "one of the two is too few: what they share stays held"


def test_nobody_waits_for_what_does_not_wait() -> None:
    state = busy_state()
    assert why_waiting(state, "alpha") is None
    assert why_waiting(state, "nobody") is None


# ---------------------------------------------------------------------------------------------------- slow tokens
def test_a_slow_token_names_the_chunk_that_shared_its_step() -> None:
    arrivals = [Arrival("chat", 0.0, made_up_prompt(1, 8), 40), Arrival("load-0", 0.2, made_up_prompt(2, 81), 2)]
    state = fold_all(run_workload(arrivals, Settings()))
    slow = slowest_token(state, "chat")
    assert slow is not None
    assert slow.cause == "prompt"
    step_id = slow.company.step_id
    company = step_company(state, step_id)
    assert company is not None
    assert [(prompt.request_id, prompt.num_tokens) for prompt in company.prompts] == [("load-0", 81)]
    assert slow_words(slow) == f"slowest token: 43 ms, usually 10 ms: load-0's 81-token prompt in step {step_id}"
    assert company_words(company) == "41 ms, usually 8.4 ms: load-0's 81-token prompt, 1 decodes"
    assert step_words(state, step_id) == company_words(company)


def test_what_is_usual_is_a_step_without_prompts_even_where_most_have_some() -> None:
    arrivals = [Arrival("chat", 0.0, made_up_prompt(1, 8), 60), Arrival("load-0", 0.2, made_up_prompt(2, 600), 2)]
    state = fold_all(run_workload(arrivals, Settings(max_num_batched_tokens=16)))
    with_prompt = sum(mark.num_prompt_tokens > 0 for mark in state.waterfall.marks)
    assert with_prompt * 2 > len(state.waterfall.marks)
    assert usual_duration(state.waterfall) == pytest.approx(0.0084)


def test_a_chunk_is_called_a_chunk() -> None:
    arrivals = [Arrival("chat", 0.0, made_up_prompt(1, 8), 40), Arrival("load-0", 0.2, made_up_prompt(2, 200), 2)]
    state = fold_all(run_workload(arrivals, Settings(max_num_batched_tokens=82)))
    slow = slowest_token(state, "chat")
    assert slow is not None
    assert "load-0's 81-token chunk in step" in slow_words(slow)


def test_a_preempted_requests_slowest_token_is_the_one_it_lost_its_blocks_for() -> None:
    arrivals = crowd(12, every_s=0.01, prompt=24, max_tokens=60)
    state = fold_all(run_workload(arrivals, Settings(num_kv_cache_blocks=60)))
    preempted = [row for row in state.finished.values() if row.num_preemptions and row.num_output_tokens > 5]
    assert preempted
    causes = [slow.cause for row in preempted if (slow := slowest_token(state, row.request_id)) is not None]
    assert causes.count("preempted") >= len(causes) // 2


def test_gaps_are_those_between_the_tokens_that_came() -> None:
    """Against the events themselves: the longest time between two results that held a token of the request."""
    run = make_run()
    state = DashboardState()
    state.apply(run.header)
    times: dict[str, list[float]] = {}
    for event in run.events:
        state.apply(event)
        if isinstance(event, StepResultEvent):
            for name, count in event.num_new_tokens.items():
                if count:
                    times.setdefault(name, []).append(event.time)
    checked = 0
    for name, moments in times.items():
        row = state.row(name)
        if len(moments) < 2 or row is None or row.finish_reason != "length":
            continue
        slow = slowest_token(state, name)
        assert slow is not None
        assert slow.gap == pytest.approx(max(b - a for a, b in itertools.pairwise(moments))), name
        checked += 1
    assert checked > 5


# ---------------------------------------------------------------------------------------------------- in words
def test_the_words_for_a_waiting_request() -> None:
    state = busy_state()
    words = request_words(state, "theta")
    assert words[0] == "2nd of 2 in the queue, behind eta"
    assert words[1].startswith("no_blocks: it needs 8 KV blocks, those before it 8; ")
    assert words[2].startswith("blocks held: by alpha 12")
    assert "must end first: in" in words[3]
    assert state_to_json(state)["why"]["waiting"][1]["words"] == words


def test_remedies_in_words() -> None:
    finding = Finding("no_blocks", 0.41, 40, "num_kv_cache_blocks", 64, 128, "or lower max_num_seqs (8) to 3")
    assert remedy_words(finding) == "raise num_kv_cache_blocks (64 to 128) or lower max_num_seqs (8) to 3"
    assert remedy_words(finding, brief=True) == "raise num_kv_cache_blocks (64 to 128)"
    finding = Finding("long_prompts", 0.2, 9, "long_prefill_token_threshold", 0, 25, "")
    assert remedy_words(finding) == "set long_prefill_token_threshold to 25"
    assert remedy_words(dataclasses.replace(finding, present=100)) == "lower long_prefill_token_threshold (100 to 25)"
    assert remedy_words(dataclasses.replace(finding, present=None, proposed=None)) == "set long_prefill_token_threshold"
