"""Whatever hypothesis makes the scheduler do runs again to the same frames, with text and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from aioengine.events.step_event import StepEvent
from aioengine.events.wire import decode, decode_header
from aioengine.replay.frames import replay_frames
from tests.core.test_scheduler_machine import SchedulerMachine
from tests.replay.recorded_scheduler import RecordedScheduler

ROOT = Path(__file__).resolve().parents[2]


class RecordedMachine(SchedulerMachine):
    """Runs each example again when it is over."""

    scheduler_type = RecordedScheduler
    longest: ClassVar[dict[bool, list[bytes]]] = {}
    num_steps: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "scheduler"):
            return
        assert isinstance(self.scheduler, RecordedScheduler)
        for include_prompts in (True, False):
            lines = self.scheduler.recording(include_prompts=include_prompts)
            events = [decode(line) for line in lines[1:]]
            report = replay_frames(decode_header(lines[0]), events)
            assert report.difference is None, f"{include_prompts=}: {report.difference}"
            assert report.num_steps == sum(isinstance(event, StepEvent) for event in events)
            if len(lines) > len(self.longest.get(include_prompts, [])):
                self.longest[include_prompts] = lines
        type(self).num_steps += report.num_steps
        type(self).num_preemptions += report.num_preemptions


def _run(machine: type[RecordedMachine], *, max_examples: int) -> None:
    machine.longest, machine.num_steps, machine.num_preemptions = {}, 0, 0
    # No shrinking: the recording itself is the example, and `aioengine replay` finds its step.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            database=None,
            derandomize=True,
        ),
    )


def test_what_the_machine_did_runs_again_here_and_in_a_process_with_other_hash_seeds(tmp_path: Path) -> None:
    _run(RecordedMachine, max_examples=60)
    assert RecordedMachine.num_steps > 300  # hypothesis draws constants from the source, so how many there are varies
    assert RecordedMachine.num_preemptions > 5
    paths = []
    for include_prompts, lines in RecordedMachine.longest.items():
        paths.append(tmp_path / f"{include_prompts}.jsonl")
        paths[-1].write_bytes(b"".join(lines))
    environment = {**os.environ, "PYTHONHASHSEED": "99", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(ROOT / "tests/replay/replay_script.py"), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report[2] for report in reports] == ["None", "None"]
    assert all(report[0] > 30 for report in reports)


@pytest.mark.ci
@pytest.mark.slow
def test_hundreds_of_the_machines_runs_run_again() -> None:
    _run(RecordedMachine, max_examples=400)
    assert RecordedMachine.num_steps > 5000
