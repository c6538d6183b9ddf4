"""Runs recordings again in a process of its own: prints a JSON report a file."""

from __future__ import annotations

import json
import sys

from aioengine.events.recording.reader import read_recording
from aioengine.replay.frames import replay_frames

for name in sys.argv[1:]:
    recording = read_recording(name)
    report = replay_frames(recording.header, recording.events)
    print(json.dumps([report.num_steps, report.num_preemptions, str(report.difference)]))
