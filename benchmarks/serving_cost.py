"""What the HTTP server costs over the bare engine, and how even its streams are. No model: the steps are pretended.

    python benchmarks/serving_cost.py cost       CPU of an SSE event and of a request, over the bare engine's
    python benchmarks/serving_cost.py gaps       256 streams at once: gaps between events against the step time
    python benchmarks/serving_cost.py metrics    CPU of folding the metrics, of a step

Server and client are two processes; CPU is the server's own. "without sockets" calls the app as an ASGI server would. Ratios of one
run: on a busy machine repeat it, and take the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from aioengine.engine.async_engine import AsyncEngine
from aioengine.sampling_params import RequestOutputKind, SamplingParams
from aioengine.server import create_app
from aioengine.server.run import Server, bind
from aioengine.testing import FakeTokenizer, make_model_info
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.http_client import HttpClient
from aioengine_bench.null_executor import NullExecutor
from aioengine_bench.specs import RemoteSpec

NUM_CONNECTIONS = 32
PROMPT = list(range(97, 113))
BODY = {"prompt": PROMPT, "stream": True, "ignore_eos": True, "temperature": 0}


@asynccontextmanager
async def null_engine(*, forward_s: float = 0.0, num_reqs: int = NUM_CONNECTIONS) -> AsyncIterator[AsyncEngine]:
    executor = NullExecutor(forward_s=forward_s)
    options: dict[str, Any] = {
        "max_num_seqs": num_reqs,
        "max_num_batched_tokens": 8192,
        "max_model_len": 1024,
        "num_kv_cache_blocks": 20_000,
    }
    options |= {"enable_prefix_caching": False, "check_invariants": False}
    async with AsyncEngine(executor=executor, tokenizer=FakeTokenizer(), model_info=make_model_info(), **options) as engine:
        yield engine


async def cpu_of(work: Callable[[int], Coroutine[Any, Any, None]], *, num_tokens: int, num_rounds: int) -> float:
    """CPU seconds of a request: `num_rounds` times 32 of them at once."""

    async def rounds() -> None:
        for _ in range(num_rounds):
            await work(num_tokens)

    await work(num_tokens)
    gc.collect()
    start = time.process_time()
    await asyncio.gather(*(rounds() for _ in range(NUM_CONNECTIONS)))
    return (time.process_time() - start) / (num_rounds * NUM_CONNECTIONS)


async def bare(engine: AsyncEngine, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA)
    async for _ in engine.generate(PROMPT, params):
        pass


def through(app: Any) -> Callable[[int], Coroutine[Any, Any, None]]:
    """A request to the app without a socket."""

    async def one(num_tokens: int) -> None:
        body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            assert message.get("status", 200) == 200, message

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": ""}
        scope |= {"query_string": b"", "headers": [(b"host", b"x")], "http_version": "1.1", "scheme": "http"}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
        await app(scope, receive, send)

    return one


async def cost(num_rounds: int) -> dict[str, float]:
    """Two lengths tell the cost of a request from that of an event."""
    long, short = 201, 1
    found: dict[str, float] = {}
    async with null_engine() as engine:
        app = create_app(engine)
        ways: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {"bare": lambda n: bare(engine, n), "without sockets": through(app)}
        cpu = {
            (name, length): min([await cpu_of(way, num_tokens=length, num_rounds=num_rounds if length == short else 2) for _ in range(3)])
            for name, way in ways.items()
            for length in (short, long)
        }
        for length in (short, long):
            cpu["sockets", length] = await cpu_over_sockets(app, num_tokens=length, num_rounds=num_rounds if length == short else 2)
    for name in ("without sockets", "sockets"):
        event = (cpu[name, long] - cpu[name, short] - cpu["bare", long] + cpu["bare", short]) / (long - short)
        found[f"us an event, {name}"] = event * 1e6
        found[f"ms a request, {name}"] = (cpu[name, short] - cpu["bare", short]) * 1e3
    found["us a token of the bare engine"] = (cpu["bare", long] - cpu["bare", short]) / (long - short) * 1e6
    return found


async def cpu_over_sockets(app: Any, *, num_tokens: int, num_rounds: int) -> float:
    async with served(app) as port:
        found = []
        for _ in range(3):
            await run_client(port, num_tokens=num_tokens, num_streams=NUM_CONNECTIONS, num_rounds=1)
            start = time.process_time()
            await run_client(port, num_tokens=num_tokens, num_streams=NUM_CONNECTIONS, num_rounds=num_rounds)
            found.append((time.process_time() - start) / (num_rounds * NUM_CONNECTIONS))
    return min(found)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    sockets = bind("127.0.0.1", 0)
    port = int(sockets[0].getsockname()[1])
    server = Server(app, sockets)
    task = asyncio.create_task(server.serve())
    while not server.is_listening:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield port
    server.stop()
    await task


async def run_client(port: int, **options: int) -> dict[str, Any]:
    """In a process of its own."""
    command = [sys.executable, __file__, "client", "--port", str(port)]
    command += [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    result: dict[str, Any] = json.loads(output)
    return result


async def client(port: int, num_tokens: int, num_streams: int, num_rounds: int) -> dict[str, Any]:
    """Gaps between the events of each stream, in milliseconds."""
    remote = RemoteSpec(base_url=f"http://127.0.0.1:{port}")
    http = HttpClient(remote, model="smollm2", tokenizer=FakeTokenizer())
    gaps: list[float] = []

    async def stream() -> None:
        for _ in range(num_rounds):
            times = [chunk.time or 0.0 async for chunk in http.send(BenchRequest(PROMPT, num_tokens), request_id="x")]
            gaps.extend((later - earlier) * 1e3 for earlier, later in itertools.pairwise(times))

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    await http.close()
    gaps.sort()
    return {"num_gaps": len(gaps), **({"p50": gaps[len(gaps) // 2], "p99": gaps[len(gaps) * 99 // 100]} if gaps else {})}


async def gaps(num_streams: int, forward_ms: float) -> dict[str, float]:
    async with null_engine(forward_s=forward_ms / 1e3, num_reqs=num_streams) as engine:
        steps: list[float] = []
        engine.bus.add_observer(lambda event: steps.append(event.time) if hasattr(event, "update_end") else None)
        async with served(create_app(engine)) as port:
            result = await run_client(port, num_tokens=100, num_streams=num_streams, num_rounds=1)
    lengths = sorted((later - earlier) * 1e3 for earlier, later in itertools.pairwise(steps))
    step = statistics.median(lengths)
    return {"step ms": step, "p50 gap ms": result["p50"], "p99 gap ms": result["p99"], "p99 over the step ms": result["p99"] - step}


async def metrics(num_rounds: int) -> dict[str, float]:
    """CPU that the fold takes, of a step of 32 requests: with it less without it."""
    found = {}
    for is_on in (False, True):
        async with null_engine() as engine:
            app = create_app(engine)
            if is_on:
                app.state.service.started_metrics()
            found[is_on] = min([await cpu_of(lambda n: bare(engine, n), num_tokens=201, num_rounds=2) for _ in range(num_rounds)])
    return {"us a step of 32 requests": (found[True] - found[False]) / 201 * NUM_CONNECTIONS * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "gaps", "metrics", "client"))
    parser.add_argument("--port", type=int)
    parser.add_argument("--num-tokens", type=int)
    parser.add_argument("--num-streams", type=int, default=256)
    parser.add_argument("--num-rounds", type=int, default=20)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    args = parser.parse_args()
    runs: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
        "cost": lambda: cost(args.num_rounds),
        "gaps": lambda: gaps(args.num_streams, args.forward_ms),
        "metrics": lambda: metrics(3),
        "client": lambda: client(args.port, args.num_tokens, args.num_streams, args.num_rounds),
    }
    gc.freeze()  # as in `aioengine serve`
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(runs[args.what]())
    if args.what == "client":
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<36}{value:10.2f}")


if __name__ == "__main__":
    main()
