"""`vllm-htop` reads the server's metrics as it reads vLLM's: python vllm_htop_client.py URL MODEL."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

URL, MODEL = sys.argv[1:3]


def main() -> None:
    body = json.dumps({"model": MODEL, "prompt": "One, two,", "max_tokens": 4, "ignore_eos": True}).encode()
    with urllib.request.urlopen(f"{URL}/v1/completions", data=body, timeout=60) as response:
        assert response.status == 200
    program = Path(sys.executable).with_name("vllm-htop")
    options = ["--once", "--output", "json", "--no-gpu-detect", "--interval", "1"]
    done = subprocess.run([program, "--url", URL, *options], capture_output=True, check=True, timeout=60)
    (seen,) = json.loads(done.stdout)["replicas"]
    assert seen["status"] == "OK", seen
    assert seen["model"] == MODEL, seen
    assert seen["running"] == 0, seen
    assert seen["lifetime"]["gen_tokens_total"] >= 4, seen
    assert seen["latency_seconds"]["ttft"]["p50"] > 0, seen
    print("vllm-htop: ok")


main()
