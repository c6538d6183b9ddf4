"""`vllm-router` in front of a running server: python vllm_router_client.py URL MODEL. One server stands for two replicas."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

URL, MODEL = sys.argv[1:3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def main() -> None:
    port, other = free_port(), URL.replace("127.0.0.1", "localhost")
    program = Path(sys.executable).with_name("vllm-router")
    options = ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with subprocess.Popen([program, "--worker-urls", URL, other, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as router:
        try:
            for attempt in range(60):
                time.sleep(0.5)
                try:
                    answer = ask(f"http://127.0.0.1:{port}")
                    break
                except OSError:
                    if attempt == 59 or router.poll() is not None:
                        raise
            assert answer["choices"][0]["message"]["content"], answer
            for _ in range(4):
                assert ask(f"http://127.0.0.1:{port}")["usage"]["completion_tokens"] == 4
        finally:
            router.terminate()
    print("vllm-router: ok")


main()
