"""`aioengine bench serve --goal`: the highest request rate that keeps limits on latencies, by trying."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aioengine.errors import AioEngineError, ConfigError
from aioengine.printable import PrintableStream
from aioengine_bench import console
from aioengine_bench.datasets import BenchRequest
from aioengine_bench.goal import Goal, percentiles_for
from aioengine_bench.host import Host
from aioengine_bench.rate_search import RateSearch, SearchSettings
from aioengine_bench.results import check_saving, save_result, timestamp, with_metadata
from aioengine_bench.serve import default_file_name, make_result, result_keys, run_load, warm_up
from aioengine_bench.settings import ServeSettings
from aioengine_bench.target import Target, opened_target


def misses(result: Mapping[str, Any], goals: Sequence[Goal]) -> list[str]:
    """Why a run does not meet the goals, in words; none: it does. A request that is lost meets nothing."""
    reasons = [
        f"{goal.name} is {console.number(result[goal.key], 1)} ms, over {goal.limit_ms:g}" for goal in goals if goal.excess(result) > 0
    ]
    lost = result["num_prompts"] - result["completed"]
    if lost:
        reasons.append(result["stop_reason"] or f"{lost} of {result['num_prompts']} requests were not completed")
    return reasons


class Search:
    """One search as it runs: what was tried, and what comes next."""

    def __init__(self, settings: SearchSettings, out: PrintableStream) -> None:
        self._settings = settings
        self._out = out
        base = settings.base
        metrics = tuple(dict.fromkeys([*base.metrics, *(goal.metric for goal in settings.goals)]))
        self.base = dataclasses.replace(base, metrics=metrics, percentiles=percentiles_for(base.percentiles, settings.goals))
        self.rates = RateSearch(start=base.arrivals.request_rate, precision=settings.precision)
        self.tries: list[dict[str, Any]] = []
        self.interrupted = False

    async def run(self, target: Target) -> None:
        """Raises ConfigError."""
        requests = self._requests(target)
        await warm_up(target.client, requests, self.base.num_warmups)
        while len(self.tries) < self._settings.tries and not self.interrupted:
            rate = self.rates.next_rate()
            if rate is None:
                return
            if target.reset is not None:
                target.reset()
            elif self.tries:  # other prompts, as the server may have kept what it computed for those of the try before
                requests = self._requests(target)
            await self._try(target, rate, requests)

    def _requests(self, target: Target) -> list[BenchRequest]:
        dataset = self.base.dataset
        requests = target.requests(dataclasses.replace(dataset, seed=dataset.seed + len(self.tries)))
        if any(request.arrival_time is not None for request in requests):
            raise ConfigError(f"the dataset {dataset.label!r} brings its own arrival times: --goal cannot choose a rate for it")
        return requests

    async def _try(self, target: Target, rate: float, requests: Sequence[BenchRequest]) -> None:
        settings = _at_rate(self.base, rate)  # with the seed of all: the same pattern of arrivals, faster or slower
        load = await run_load(settings, target.client, requests)
        result = make_result(settings, load, num_requests=len(requests), date=timestamp())
        self.interrupted = load.interrupted
        if self.interrupted:
            return
        reasons = misses(result, self._settings.goals)
        self.rates.note(rate, is_met=not reasons, throughput=result["request_throughput"] or 0.0)
        self.tries.append(result | {"meets_goal": not reasons, "misses": reasons})
        print(self._line(rate, result, reasons), file=self._out, flush=True)

    def _line(self, rate: float, result: Mapping[str, Any], reasons: Sequence[str]) -> str:
        figures = ", ".join(f"{goal.name} {console.number(result[goal.key], 1)} ms" for goal in self._settings.goals)
        reached = console.number(result["request_throughput"])
        verdict = f"misses: {'; '.join(reasons)}" if reasons else "meets it"
        return f"{len(self.tries):>3}. {_rate_text(rate)}: {figures}, {reached} completed/s: {verdict}"

    def result(self, date: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The run at the rate that was found, of none the lowest that was tried, and below "goal_search" what was tried."""
        met, missed = self.rates.met, self.rates.missed
        rate = met if met is not None else missed
        chosen = next((one for one in self.tries if one["request_rate"] == _written(rate)), {"interrupted": True})
        return {**chosen, **facts, "date": date, "interrupted": self.interrupted, "goal_search": self._findings()}

    def _findings(self) -> dict[str, Any]:
        return {
            "goals": [goal.text for goal in self._settings.goals],
            "request_rate": _written(self.rates.met),
            "lowest_rate_that_misses": _written(self.rates.missed),
            "is_precise": self.rates.next_rate() is None,
            "max_tries": self._settings.tries,
            "tries": self.tries,
        }

    def verdict(self) -> str:
        goals = ", ".join(goal.text for goal in self._settings.goals)
        met, missed = self.rates.met, self.rates.missed
        if met is None:
            return f"No rate that was tried meets {goals}" + ("" if missed is None else f"; the lowest was {_rate_text(missed)}")
        text = f"Highest rate that meets {goals}: {_rate_text(met)}"
        if missed is not None and math.isfinite(missed):
            text += f"; the lowest that misses it is {_rate_text(missed)}"
        elif math.isfinite(met):
            text += "; no rate above it was tried that misses"
        return text + ("" if self.rates.next_rate() is None else f" (not yet within --goal-precision after {len(self.tries)} tries)")


def _at_rate(settings: ServeSettings, rate: float) -> ServeSettings:
    return dataclasses.replace(settings, arrivals=dataclasses.replace(settings.arrivals, request_rate=rate))


def _written(rate: float | None) -> float | str | None:
    """As `make_result` writes it."""
    return "inf" if rate is not None and math.isinf(rate) else rate


def _rate_text(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.4g} requests/s"


async def search(settings: SearchSettings, host: Host) -> bool:
    """Try, print, save. True if it was interrupted. Raises ConfigError, and AioEngineError if no rate that was tried meets the goals."""
    date, save = timestamp(), settings.base.save
    name = f"goal-{default_file_name(settings.base, date)}"
    check_saving(save, [*result_keys(settings.base), "base_url", "endpoint", "goal_search", "meets_goal", "misses"], default_name=name)
    out = console.output_stream(stdout_is_taken=save.claims_stdout)
    async with opened_target(settings.base, host) as target:
        state = Search(settings, out)
        await state.run(target)
        result = state.result(date, target.facts())
    print(state.verdict(), file=out)
    path = save_result(with_metadata(result, save.metadata), save, default_name=name)
    if path is not None:
        print(f"Saved to {path}", file=out)
    if state.interrupted:
        print(f"Interrupted after {len(state.tries)} tries.", file=out)
    elif state.rates.met is None:
        raise AioEngineError(state.verdict())
    return state.interrupted
