"""The live workload of `aioengine top --demo`: an engine in this process that publishes its events on a socket.

`python -m aioengine.commands.demo_workload SOCKET` is what `aioengine top --demo` starts as a child process. The traffic
is varied on purpose, so that each part of the dashboard has something to show: short chats with a shared system prompt
(prefix cache), long documents (chunked prefill), bursts that overrun the small KV cache (preemption), clients that hang
up (aborts), and pauses in which everything must come back to zero.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from aioengine.commands.runtime import run
from aioengine.commands.termination import drained_on_sigterm
from aioengine.config import EngineConfig
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import EngineDeadError
from aioengine.sampling_params import SamplingParams

SYSTEM_PROMPTS = (
    "You are a friendly assistant. Answer in two or three short sentences, use plain words, and give one example.",
    "You are a careful editor. Keep the meaning of the text, correct its mistakes, and answer with the text alone.",
    "You are a guide in a museum of natural history, and the visitors of today are a school class of ten-year-olds.",
)
QUESTIONS = (
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What makes bread rise?",
    "Why do cats purr?",
    "What is a prime number?",
    "How do plants make their food?",
    "Write a haiku about the sea.",
    "What is the capital of France?",
    "How do whales breathe?",
    "Tell a story about a lighthouse.",
)
_PARAGRAPH = (
    "The river came down from the hills, and where it met the plain it slowed and spread, and left what it had carried. "
    "In spring it was brown and loud; in autumn one could cross it with dry feet on the stones that the mill had left. "
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the workload."""

    prompt: list[dict[str, str]]
    params: SamplingParams
    priority: int
    patience: float | None  # seconds after which the client hangs up; None: it waits for the end


def make_job(rng: random.Random) -> Job:
    """One request: 60 % chats with a shared system prompt, 25 % long documents, 15 % long stories."""
    kind = rng.random()
    if kind < 0.60:
        messages = [_message("system", rng.choice(SYSTEM_PROMPTS)), _message("user", rng.choice(QUESTIONS))]
        max_tokens = rng.randint(16, 64)
    elif kind < 0.85:
        # A number in front makes the documents differ from their first block on: no prefix-cache hits here.
        document = f"Document {rng.randint(1, 10_000)}. " + _PARAGRAPH * rng.randint(3, 8)
        messages = [_message("user", f"{document}\n\nSum this up in one sentence.")]
        max_tokens = rng.randint(16, 48)
    else:
        messages = [_message("user", f"Tell a long story about the number {rng.randint(1, 10_000)}.")]
        max_tokens = rng.randint(96, 192)
    params = SamplingParams(temperature=rng.choice((0.0, 0.7, 1.0)), seed=rng.randrange(2**31), max_tokens=max_tokens)
    return Job(messages, params, rng.choice((0, 0, 0, 1)), rng.uniform(0.5, 4.0) if rng.random() < 0.08 else None)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Workload:
    """Sends requests to an engine for ever: calm traffic, a burst, calm, a pause, and again."""

    def __init__(self, engine: AsyncEngine, *, seed: int, max_live: int = 48) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._max_live = max_live
        self._clients: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled or the engine dies. The clients that are left end with it."""
        try:
            while True:
                await self._calm(self._rng.uniform(8.0, 14.0))
                for _ in range(self._rng.randint(10, 18)):
                    self._send()
                await self._calm(self._rng.uniform(10.0, 16.0))
                await self._pause()
        finally:
            for client in self._clients:
                client.cancel()
            await asyncio.gather(*self._clients, return_exceptions=True)

    async def _calm(self, duration: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + duration
        while loop.time() < end:
            self._send()
            await asyncio.sleep(self._rng.expovariate(1.2))

    async def _pause(self) -> None:
        """Wait until the last request is done, and then a little: an idle engine shows zeros."""
        while self._clients:
            await asyncio.wait(self._clients)
        await asyncio.sleep(self._rng.uniform(1.5, 3.0))

    def _send(self) -> None:
        if len(self._clients) >= self._max_live:
            return  # a machine slower than the traffic must not collect requests without end
        client = asyncio.get_running_loop().create_task(self._client(make_job(self._rng)))
        self._clients.add(client)
        client.add_done_callback(self._clients.discard)

    async def _client(self, job: Job) -> None:
        with contextlib.suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(job.patience):
                async for _ in self._engine.generate(job.prompt, job.params, priority=job.priority):
                    pass


# ---------------------------------------------------------------------------------------------------- the process
async def _main(address: str, config: EngineConfig, seed: int, record: str | None) -> None:
    async with AsyncEngine(config, events=address, record=record, allow_events_control=True, publish_text=True) as engine:
        with drained_on_sigterm(engine):
            print("ready", flush=True)
            workload = asyncio.create_task(Workload(engine, seed=seed).run())
            try:
                await asyncio.wait([workload, _end_of_parent()], return_when=asyncio.FIRST_COMPLETED)
                if workload.done():
                    workload.result()
            finally:
                workload.cancel()
                await asyncio.gather(workload, return_exceptions=True)


def _end_of_parent() -> asyncio.Future[None]:
    """Done when the pipe from the parent closes, which it does however the parent ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        # Not through `sys.stdin`, whose lock Python wants when it exits.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending by itself
            loop.call_soon_threadsafe(ended.set_result, None)

    # A daemon: nothing can interrupt the read, and this process may end before its parent.
    threading.Thread(target=read, name="aioengine-parent", daemon=True).start()
    return ended


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m aioengine.commands.demo_workload", description=__doc__)
    parser.add_argument("address", help="where to publish: the path of a Unix socket")
    parser.add_argument("--config", type=json.loads, default={}, help="settings of EngineConfig, a JSON object")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--record", metavar="FILE", help="write every step to FILE as well")
    args = parser.parse_args(argv)
    run(_main(args.address, EngineConfig(**args.config), args.seed, args.record))


if __name__ == "__main__":
    main()
