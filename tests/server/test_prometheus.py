"""A real Prometheus scrapes the server, and answers the questions that vLLM's board asks. Needs the program `prometheus`."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from tests.server.sockets import KEY, serving

PROGRAM = os.environ.get("AIOENGINE_PROMETHEUS") or shutil.which("prometheus")
QUESTIONS = {
    'histogram_quantile(0.99, sum by(le) (vllm:e2e_request_latency_seconds_bucket{model_name="mine"}))': None,
    'histogram_quantile(0.5, sum by(le) (vllm:time_to_first_token_seconds_bucket{model_name="mine"}))': None,
    'sum by(le) (vllm:request_prompt_tokens_bucket{model_name="mine"})': None,
    'vllm:num_requests_running{model_name="mine"}': 0.0,
    'sum(vllm:request_success_total{model_name="mine"})': 3.0,
    "vllm:generation_tokens_total": 30.0,
    "vllm:request_max_num_generation_tokens_sum": 30.0,
    "sum(aioengine_step_seconds_count)": None,
    "up": 1.0,
}
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: aioengine
  authorization: {{credentials: {key}}}
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="the program `prometheus` is not installed")
async def test_a_real_prometheus_scrapes_and_answers_the_board(tmp_path: Path) -> None:
    assert PROGRAM is not None
    async with serving(settings={"api_key": KEY, "served_model_names": ("mine",)}) as served:
        for _ in range(3):
            body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
            assert (await served.post("/v1/completions", body, {"x-api-key": KEY})).status == 200
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(key=KEY, port=served.port))
        port = free_port()
        options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        program = await asyncio.create_subprocess_exec(
            PROGRAM, *options, f"--web.listen-address=127.0.0.1:{port}", stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                await wait_for_scrape(client)
                for question, expected in QUESTIONS.items():
                    answer = (await client.get("/api/v1/query", params={"query": question})).json()
                    values = [float(row["value"][1]) for row in answer["data"]["result"]]
                    assert values, question
                    assert expected is None or values == [expected], (question, values)
                names = (await client.get("/api/v1/label/model_name/values")).json()["data"]
                assert names == ["mine"], "the board's own choice of a model"
        finally:
            program.terminate()
            await program.wait()


async def wait_for_scrape(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                answer = (await client.get("/api/v1/query", params={"query": "vllm:generation_tokens_total"})).json()
                if answer["data"]["result"]:
                    return
            except (httpx.TransportError, KeyError, ValueError):
                pass  # it has not started yet
            await asyncio.sleep(0.3)
