"""Fixed workloads: token ids and output lengths, so that every engine and every run gets exactly the same work."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    prompt_token_ids: list[int]
    max_tokens: int  # generated exactly: end-of-sequence tokens are ignored


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests arrive at once and are decoded greedily."""

    name: str
    description: str
    max_num_seqs: int
    requests: list[WorkloadRequest]


def workload_names() -> list[str]:
    return list(_read())


def load_workload(name: str) -> Workload:
    """The workload of that name. Raises KeyError naming the ones there are."""
    workloads = _read()
    if name not in workloads:
        raise KeyError(f"no workload {name!r}; there are: {', '.join(workloads)}")
    raw = workloads[name]
    return Workload(
        name=name,
        description=raw["desc"],
        max_num_seqs=raw["max_num_seqs"],
        requests=[WorkloadRequest(request["prompt"], request["max_tokens"]) for request in raw["requests"]],
    )


def _read() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = orjson.loads(files("aioengine_bench").joinpath("workloads.json").read_bytes())
    return content
