"""The same calls give the same frames in every process: block ids, slots and order come from no hash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("hash_seed_script.py")


def test_the_same_calls_give_the_same_frames_slots_and_recordings_under_every_hash_seed() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in ("0", "1", "4242")
    ]
    outputs = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr.decode()
        outputs.append(stdout.decode().splitlines())
    assert len(outputs[0]) > 1000
    for other in outputs[1:]:
        for number, (line, expected) in enumerate(zip(other, outputs[0], strict=True)):
            assert line == expected, f"line {number} differs"
