"""Which requests of a step need a mask: those with structured output that sample a token in it."""

from __future__ import annotations

from aioengine.outputs import ModelRunnerOutput
from aioengine.sampling_params import StructuredOutputsParams
from aioengine.testing import make_request, make_scheduler

STRUCTURED = StructuredOutputsParams(regex="a*")


def test_only_those_that_sample_are_named() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    scheduler.add_request(make_request(4, request_id="plain", max_tokens=9))
    scheduler.add_request(make_request(4, request_id="short", max_tokens=9, structured_outputs=STRUCTURED))
    scheduler.add_request(make_request(11, request_id="long", max_tokens=9, structured_outputs=STRUCTURED))
    steps = [scheduler.schedule() for _ in range(3)]
    named = [step.structured_output_request_ids for step in steps if step is not None]
    # The prompt of "long" takes two steps; the later ones go on from tokens that are not known yet.
    assert named == [{"short"}, {"short", "long"}, {"short", "long"}]

    step = steps[0]
    assert step is not None
    req_ids = list(step.num_scheduled_tokens)
    sampled = [[] if req_id == "long" else [97] for req_id in req_ids]
    scheduler.update_from_output(step, ModelRunnerOutput(req_ids, {req_id: i for i, req_id in enumerate(req_ids)}, sampled))
    for req_id in ("short", "long"):
        scheduler.finish_requests([req_id], scheduler.requests[req_id].status.FINISHED_ABORTED)
    after = scheduler.schedule()
    assert after is not None
    assert after.structured_output_request_ids == frozenset()
