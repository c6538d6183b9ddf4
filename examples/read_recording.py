"""Which requests of a recording waited, for how many steps and why: python read_recording.py steps.jsonl"""

import sys
from collections import Counter

from aioengine import StepEvent
from aioengine.events.recording.reader import read_recording


def main(path: str) -> None:
    recording = read_recording(path)
    steps = [event for event in recording.events if isinstance(event, StepEvent)]
    waiting: set[str] = set()
    waits: dict[str, Counter[str]] = {}
    for step in steps:
        waiting |= {info.request_id for info in step.added} | step.output.preempted_req_ids
        waiting -= step.output.num_scheduled_tokens.keys() | {info.request_id for info in step.finished}
        for req_id in sorted(waiting):
            waits.setdefault(req_id, Counter())[step.admission_stop] += 1
    num_tokens = sum(step.output.total_num_scheduled_tokens for step in steps)
    print(f"{len(steps)} steps, {num_tokens} tokens, {steps[-1].stats.num_preemptions} preemptions")
    for req_id, reasons in waits.items():
        print(f"{req_id} waited: " + ", ".join(f"{count} steps for {reason}" for reason, count in reasons.items()))


if __name__ == "__main__":
    main(sys.argv[1])
