"""Which rows of a step go through which LoRA adapter."""

from __future__ import annotations

from aioengine.models.lora import AdapterRun
from aioengine.worker.input_batch import InputBatch
from aioengine.worker.request_state import RequestStates


def adapter_runs(batch: InputBatch, states: RequestStates) -> tuple[AdapterRun, ...]:
    """Neighbouring requests with the same adapter are one run; empty: no row of the step has one."""
    runs: list[AdapterRun] = []
    starts = batch.query_start_loc_np.tolist()
    for index, req_id in enumerate(batch.req_ids):
        name = states.lora_names.get(req_id)
        if name is None:
            continue
        first = starts[index]
        if runs and runs[-1].name == name and runs[-1].end == first:
            first = runs.pop().first
        runs.append(AdapterRun(name, first, starts[index + 1]))
    return tuple(runs)
