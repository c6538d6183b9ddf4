"""`vllmstat` reads the server's metrics as it reads vLLM's: python vllmstat_client.py URL MODEL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

URL, MODEL = sys.argv[1:3]


def main() -> None:
    program = Path(sys.executable).with_name("vllmstat")
    done = subprocess.run([program, "-u", URL, "--once", "--json", "--no-gpu"], capture_output=True, check=True, timeout=60)
    seen = json.loads(done.stdout)
    assert seen["connected"] is True, seen
    assert seen["model_names"] == [MODEL], seen
    assert seen["running"] is not None, seen
    print("vllmstat: ok")


main()
