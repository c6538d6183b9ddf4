"""Random load with everything at once, for as long as one likes: nothing may break, hang, leak, or change an answer.

Clients come and go in rounds. Within a round everything happens at the same time: shared prefixes, preemptions, n > 1, all
kinds of parameters, time-outs, aborts, cancelled and slow consumers, pauses, refused requests. After it the engine must be as
it was: nothing live, all blocks free. Probes are requests whose answer is known from a quiet engine; under load it must be the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioengine.core.invariants import check_idle
from aioengine.engine.async_engine import AsyncEngine
from aioengine.errors import EngineOverloadedError, RequestTimeoutError
from aioengine.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

Prompt = str | list[int]

_WORDS = ("the", "river", "came", "down", "from", "hills", "and", "where", "it", "met", "plain", "slowed", "left", "what", "had")
_QUIET_S = 60.0  # how long a round may take to end: far beyond any request


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Taken between two rounds, when nothing is live."""

    time_s: float  # since the start
    traced_bytes: int  # held by Python objects; 0 if tracemalloc does not run
    rss_bytes: int


@dataclass(slots=True)
class SoakReport:
    """What happened. `violations` must be empty."""

    num_rounds: int = 0
    endings: Counter[str] = field(default_factory=Counter)  # why requests ended, as their consumers saw it
    num_steps: int = 0
    num_preemptions: int = 0
    num_probes: int = 0
    memory: list[MemorySample] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def growth(self) -> tuple[int, int]:
        """By how many bytes traced and resident memory grew from the first third of the samples to the last third.

        The least of each third is compared: what the allocator keeps for a while is no growth.
        """
        third = max(1, len(self.memory) // 3)
        first, last = self.memory[:third], self.memory[-third:]
        return (
            min(sample.traced_bytes for sample in last) - min(sample.traced_bytes for sample in first),
            min(sample.rss_bytes for sample in last) - min(sample.rss_bytes for sample in first),
        )


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """The rounds go on for `duration_s` seconds, and until there have been `min_rounds` and all `wanted_endings` of requests."""

    duration_s: float
    min_rounds: int = 0
    wanted_endings: frozenset[str] = frozenset()
    seed: int = 0
    clients_per_round: int = 60
    concurrency: int = 24
    max_tokens: int = 40
    features: frozenset[str] = frozenset({"penalties", "logprobs", "structured"})


class Soak:
    """Runs rounds against one started engine until the time is over. `on_round` is called after each."""

    def __init__(self, engine: AsyncEngine, options: SoakOptions, *, on_round: Callable[[SoakReport], None] | None = None) -> None:
        self.report = SoakReport()
        self._engine = engine
        self._options = options
        self._on_round = on_round or (lambda report: None)
        self._rng = random.Random(options.seed)
        self._prefixes = [" ".join(self._rng.choices(_WORDS, k=12)) + ". " for _ in range(4)]
        self._probes: list[tuple[Prompt, SamplingParams, list[int]]] = []
        self._vocab_size = engine.model_info.vocab_size
        self._num_requests = 0
        self._start = time.monotonic()

    async def run(self) -> SoakReport:
        """Returns the report; a violation ends the run."""
        await self._make_probes()
        while self._goes_on() and not self.report.violations:
            await self._round()
            self._on_round(self.report)
        return self.report

    def _goes_on(self) -> bool:
        report, options = self.report, self._options
        is_early = time.monotonic() - self._start < options.duration_s or report.num_rounds < options.min_rounds
        return is_early or not options.wanted_endings <= report.endings.keys()

    async def _make_probes(self) -> None:
        """Their answers, one at a time."""
        for index in range(6):
            params = SamplingParams(temperature=float(index % 2), seed=index, max_tokens=10 + 4 * index, ignore_eos=True)
            prompt = self._prefixes[index % 4] + str(index)
            (output,) = await self._engine.generate_batch([prompt], params, progress=False)
            self._probes.append((prompt, params, output.token_ids))

    async def _round(self) -> None:
        report = self.report
        limit = asyncio.Semaphore(self._options.concurrency)
        clients = [asyncio.create_task(self._client(limit, self._rng.getrandbits(32))) for _ in range(self._options.clients_per_round)]
        probes = [asyncio.create_task(self._probe(*probe)) for probe in self._probes]
        pauses = asyncio.create_task(self._pauses())
        for task in self._rng.sample(clients, len(clients) // 10):
            asyncio.get_running_loop().call_later(self._rng.random() * 0.5, task.cancel)
        try:
            results = await asyncio.wait_for(asyncio.gather(*clients, *probes, return_exceptions=True), _QUIET_S)
            for result in results:
                if isinstance(result, asyncio.CancelledError):
                    report.endings["cancelled"] += 1
                elif isinstance(result, BaseException):
                    report.violations.append(f"{type(result).__name__}: {result}")
        except TimeoutError:
            report.violations.append(f"a round has not ended after {_QUIET_S:g} s: {self._engine.stats()}")
        finally:
            pauses.cancel()
            await asyncio.gather(pauses, return_exceptions=True)
        if not report.violations:
            await self._settle()
        report.num_rounds += 1

    async def _pauses(self) -> None:
        while True:
            await asyncio.sleep(0.02 + self._rng.random() * 0.3)
            self._engine.pause()
            try:
                await asyncio.sleep(self._rng.random() * 0.01)
                if self._rng.random() < 0.5:
                    await self._engine.step()
            finally:
                self._engine.resume()

    async def _settle(self) -> None:
        """Nothing may be left of the round."""
        report, parts = self.report, self._engine._life.started()
        core = parts.core
        try:
            await asyncio.wait_for(core.wait_until_idle(), _QUIET_S)
            self._engine.check_health()
            check_idle(core.scheduler)
            if parts.output.num_live:
                report.violations.append("streams are left over")
        except (AssertionError, TimeoutError) as exc:
            report.violations.append(f"after a round: {type(exc).__name__}: {exc}")
        stats = self._engine.stats()
        report.num_steps, report.num_preemptions = core.scheduler.last_step_id, stats.num_preemptions
        if self._rng.random() < 0.2 and not self._engine.reset_prefix_cache():
            report.violations.append("an idle engine refused to reset the prefix cache")
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0
        report.memory.append(MemorySample(time.monotonic() - self._start, traced, rss_bytes()))

    # ------------------------------------------------------------------ clients
    async def _probe(self, prompt: Prompt, params: SamplingParams, expected: list[int]) -> None:
        try:
            outputs = [output async for output in self._engine.generate(prompt, params, priority=-1)]
        except EngineOverloadedError:
            self.report.endings["refused"] += 1
            return
        self.report.num_probes += 1
        if outputs[-1].token_ids != expected:
            self.report.violations.append(f"a probe was answered with {outputs[-1].token_ids}, a quiet engine answers {expected}")

    async def _client(self, limit: asyncio.Semaphore, seed: int) -> None:
        rng = random.Random(seed)
        async with limit:
            self._num_requests += 1
            request_id = f"soak-{self._num_requests}"
            way = rng.choice(("read", "read", "read", "leave", "abort", "slow", "late abort"))
            stream = self._engine.generate(
                self._prompt(rng),
                self._params(rng),
                request_id=request_id,
                priority=rng.randrange(3),
                cache_salt=rng.choice((None, None, None, "salt")),
                timeout=rng.choice((None, None, None, 0.005 + rng.random() * 0.3)),
            )
            if way == "late abort":
                asyncio.get_running_loop().call_later(rng.random() * 0.2, self._engine.abort, request_id)
            async with contextlib.aclosing(stream):
                self.report.endings[await self._consume(stream, rng, way, request_id)] += 1

    async def _consume(self, stream: Any, rng: random.Random, way: str, request_id: str) -> str:
        last = rng.randrange(1, 12)
        reason = "?"
        try:
            count = 0
            async for output in stream:
                count += 1
                reason = "/".join(sorted({str(completion.finish_reason) for completion in output.outputs}))
                if count == last and way == "leave":
                    return "left"
                if count == last and way == "abort":
                    self._engine.abort(request_id)
                if way == "slow":
                    await asyncio.sleep(rng.random() * 0.02)
        except EngineOverloadedError:
            return "refused"
        except RequestTimeoutError:
            return "timed out"
        return reason

    def _prompt(self, rng: random.Random) -> Prompt:
        if rng.random() < 0.3:
            return [rng.randrange(min(200, self._vocab_size)) for _ in range(rng.randrange(1, 80))]
        return rng.choice(self._prefixes) + " ".join(rng.choices(_WORDS, k=rng.randrange(1, 12)))

    def _params(self, rng: random.Random) -> SamplingParams:
        features = self._options.features
        max_tokens = rng.randrange(1, self._options.max_tokens + 1)
        options: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.7, 1.0)),
            "top_k": rng.choice((0, 0, 20)),
            "top_p": rng.choice((1.0, 0.9)),
            "max_tokens": max_tokens,
            "min_tokens": rng.choice((0, 0, min(3, max_tokens))),
            "n": rng.choice((1, 1, 1, 1, 2, 3)),
            "stop": rng.choice(((), (), ("e",), ("th", " a"))),
            "ignore_eos": rng.random() < 0.5,
            "output_kind": rng.choice(list(RequestOutputKind)),
        }
        if "penalties" in features and rng.random() < 0.3:
            options |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {65: 3.0, 66: -5.0}}
            options["bad_words"] = rng.choice(((), ("hill",)))
        if "logprobs" in features and rng.random() < 0.3:
            options |= {"logprobs": rng.randrange(4), "prompt_logprobs": rng.choice((None, 1))}
        if "structured" in features and rng.random() < 0.15:
            kind: dict[str, Any] = rng.choice(({"choice": ["yes", "no", "perhaps"]}, {"regex": "[a-f]{2,9}"}, {"json_object": True}))
            options |= {"structured_outputs": StructuredOutputsParams(**kind), "stop": (), "min_tokens": 0, "ignore_eos": False}
            options["bad_words"] = ()
        return SamplingParams(**options)


def rss_bytes() -> int:
    """Resident memory of this process; its highest value so far where /proc does not tell the present one."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
