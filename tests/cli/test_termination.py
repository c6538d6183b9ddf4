"""SIGTERM: what runs comes to its end, then the command does; a second signal does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PREAMBLE = """
import asyncio, sys
from aioengine import SamplingParams
from aioengine.cli import main
from aioengine.commands import chat, demo_workload, runtime
from aioengine.commands.runtime import run, started_engine
from aioengine.commands.termination import drained_on_sigterm
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.engine.publish_options import PublishOptions
from aioengine.testing import FakeExecutor, FakeTokenizer

def fake(config, **options):
    return AsyncEngine(config, executor=FakeExecutor(num_blocks=2000, forward_s=0.005), tokenizer=FakeTokenizer(), **options)

runtime.AsyncEngine = chat.AsyncEngine = demo_workload.AsyncEngine = fake
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PREAMBLE + program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=0,
        cwd=ROOT,
    )


def read_some(process: subprocess.Popen[str], num_chars: int = 1) -> str:
    """From the descriptor: what a text wrapper reads ahead, `communicate` would not see any more."""
    assert process.stdout is not None
    return "".join(os.read(process.stdout.fileno(), 1).decode() for _ in range(num_chars))


def end(process: subprocess.Popen[str], *, within: float = 30.0) -> tuple[str, str, int]:
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    return out, err, process.returncode


GENERATE = 'sys.exit(main(["generate", "hi", "--ignore-eos", "--max-tokens", sys.argv[1]]))'


def test_generate_finishes_its_answer() -> None:
    process = start(GENERATE, "150")
    first = read_some(process)
    process.send_signal(signal.SIGTERM)
    out, err, status = end(process)
    assert len(first + out) == 151, "all tokens and the end of the line"
    assert err == "SIGTERM: 1 requests end first; a second signal does not wait for them\n"
    assert status == 0, "it came to its own end"


def test_the_second_signal_does_not_wait() -> None:
    process = start(GENERATE, "3000")
    read_some(process)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGTERM")
    process.send_signal(signal.SIGTERM)
    out, _, status = end(process, within=10)
    assert status == 143
    assert len(out) < 2000


def test_ctrl_c_after_sigterm_does_not_wait_either() -> None:
    process = start(GENERATE, "3000")
    read_some(process)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGTERM")
    process.send_signal(signal.SIGINT)
    _, _, status = end(process, within=10)
    assert status == 130


def test_a_command_that_would_go_on_is_ended_when_the_engine_is_drained() -> None:
    program = """
async def serve():
    async with started_engine(EngineConfig(), PublishOptions()) as engine:
        outputs = asyncio.create_task(engine.generate_batch([[1]], SamplingParams(max_tokens=60, ignore_eos=True)))
        await asyncio.sleep(0.05)
        print("ready", flush=True)
        try:
            await asyncio.sleep(60)
        finally:
            print(len((await outputs)[0].token_ids), flush=True)
run(serve())
"""
    process = start(program)
    assert read_some(process, 6) == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert end(process, within=10)[::2] == ("60\n", 143)


def test_no_further_engine_is_started() -> None:
    program = """
async def sweep():
    for number in range(3):
        async with started_engine(EngineConfig(), PublishOptions()) as engine:
            print(number, flush=True)
            await engine.generate_batch([[1]], SamplingParams(max_tokens=60, ignore_eos=True))
run(sweep())
"""
    process = start(program)
    assert read_some(process, 2) == "0\n"
    process.send_signal(signal.SIGTERM)
    assert end(process, within=10)[::2] == ("", 143)


def test_without_an_engine_there_is_nothing_to_wait_for() -> None:
    process = start('async def wait():\n    print("ready", flush=True)\n    await asyncio.sleep(60)\nrun(wait())')
    assert read_some(process, 6) == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert end(process, within=10)[2] == 143


def test_the_workload_of_top_demo_drains_and_leaves_no_socket(tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    process = start("demo_workload.main([sys.argv[1]])", str(socket))
    assert read_some(process, 6) == "ready\n"
    assert socket.exists()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143, "its standard input is still open"
    assert "requests end first" in end(process)[1]
    assert not socket.exists()


CHAT = 'sys.exit(main(["chat", "--max-tokens", "150", "--ignore-eos"]))'


def test_chat_finishes_its_answer() -> None:
    process = start(CHAT)
    assert process.stdin is not None
    process.stdin.write("Hello\nanother\n")
    first = read_some(process)
    process.send_signal(signal.SIGTERM)
    out, err, status = end(process)
    assert len(first + out) == 151
    assert "this answer is the last one" in err
    assert status == 0


def test_chat_leaves_at_once_between_answers() -> None:
    process = start(CHAT)
    assert process.stdin is not None
    process.stdin.write("Hello\n")
    read_some(process, 151)
    process.send_signal(signal.SIGTERM)
    assert end(process, within=10)[2] == 143
