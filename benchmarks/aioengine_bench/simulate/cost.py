"""How long a step takes: fitted to a recording, or from the shape of a model and a device.

A step costs a constant, and so much a token, a request, a sampled token, a pair of tokens that attend to each other, and a token of
context that is read. A fit is by non-negative least squares on relative errors, so that no term becomes a gain and short steps
count as much as long ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aioengine.core.scheduler_output import SchedulerOutput
from aioengine.errors import ConfigError
from aioengine.events.step_event import StepEvent, StepResultEvent

if TYPE_CHECKING:
    from aioengine.events.recording.reader import Recording

FEATURES = ("step", "tokens", "requests", "sampled", "pairs", "context")
Features = tuple[float, float, float, float, float, float]
_ROUNDS = 4000
_MIN_STEPS = 20
_LEAST_S = 1e-6  # a step that took no time is no reason to divide by it
_LEAST_HIDDEN_SIZE = 64


class StepCost(Protocol):
    """Seconds of the worker for a step."""

    def __call__(self, features: Features) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """weights: seconds for one of each of FEATURES."""

    weights: tuple[float, ...]

    def __call__(self, features: Features) -> float:
        a, b, c, d, e, f = self.weights
        return a + b * features[1] + c * features[2] + d * features[3] + e * features[4] + f * features[5]


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of the event loop: a call of schedule(), from the worker's end to the update, and the update with all that follows."""

    schedule_s: float = 0.0
    wake_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """The longer of computing and of reading weights and cache once, and a constant for launching. Units: SI.

    num_params: weights that a token is multiplied with. kv_bytes_per_token: of all layers. width: heads times head_dim times layers.
    """

    num_params: float
    weight_bytes: float
    kv_bytes_per_token: float
    width: float
    flops: float
    bandwidth: float
    overhead_s: float = 0.0

    def __call__(self, features: Features) -> float:
        compute = (2 * self.num_params * features[1] + 4 * self.width * features[4]) / self.flops
        memory = (self.weight_bytes + self.kv_bytes_per_token * features[5]) / self.bandwidth
        return max(compute, memory) + self.overhead_s


# Parameters, bytes of weights, bytes of keys and values a token, heads * head_dim * layers: of the published shapes, in bfloat16.
MODELS: dict[str, tuple[float, float, float, float]] = {
    "smollm2-135m": (134.5e6, 269e6, 30 * 2 * 3 * 64 * 2, 30 * 9 * 64),
    "llama-3-8b": (8.03e9, 16.06e9, 32 * 2 * 8 * 128 * 2, 32 * 32 * 128),
    "llama-3-70b": (70.6e9, 141.2e9, 80 * 2 * 8 * 128 * 2, 80 * 64 * 128),
}
# Dense bfloat16 operations a second and bytes a second, of the data sheets; a step reaches some share of them.
DEVICES: dict[str, tuple[float, float]] = {"a100": (312e12, 2.0e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12)}
_REACHED = 0.6
_LAUNCH_S = 0.002


def roofline(model: str, device: str) -> Roofline:
    """Raises ConfigError naming what there is."""
    for name, known in ((model, MODELS), (device, DEVICES)):
        if name not in known:
            raise ConfigError(f"there is no roofline for {name!r}, only for {', '.join(known)}")
    flops, bandwidth = DEVICES[device]
    return Roofline(*MODELS[model], flops=flops * _REACHED, bandwidth=bandwidth * _REACHED, overhead_s=_LAUNCH_S)


class StepFeatures:
    """Tells the features of each step, and who samples in it, from the outputs alone, in order."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[str, int] = {}

    def __call__(self, output: SchedulerOutput) -> tuple[Features, dict[str, bool]]:
        """And by request, those that the worker knows first, whether it samples."""
        known, scheduled, drafts = self._num_prompt_tokens, output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        for req_id in output.finished_req_ids:
            known.pop(req_id, None)
        pairs = context = 0
        samples: dict[str, bool] = {}
        cached = output.scheduled_cached_reqs
        for req_id, start, num_output in zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True):
            num_tokens = scheduled[req_id]
            end = start + num_tokens
            context += end
            pairs += end if num_tokens == 1 else num_tokens * start + num_tokens * (num_tokens + 1) // 2
            samples[req_id] = end == known[req_id] + num_output + (len(drafts[req_id]) if drafts and req_id in drafts else 0)
        for new in output.scheduled_new_reqs:
            num_tokens, start = scheduled[new.req_id], new.num_computed_tokens
            known[new.req_id] = len(new.prompt_token_ids)
            context += start + num_tokens
            pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
            samples[new.req_id] = start + num_tokens == len(new.prompt_token_ids)
        num_sampled = sum(samples.values())
        return (1.0, output.total_num_scheduled_tokens, len(samples), num_sampled, pairs, context), samples


def fit(recording: Recording) -> tuple[LinearCost, HostCost, float]:
    """The costs that explain a recording best, and the median relative error of a step. Raises ConfigError for too few steps."""
    features, rows, seconds = StepFeatures(), [], []
    open_steps: dict[int, Features] = {}
    schedule: list[float] = []
    wake: list[float] = []
    update: list[float] = []
    for event in recording.events:
        if isinstance(event, StepEvent):
            open_steps[event.step_id] = features(event.output)[0]
            schedule.append(event.schedule_end - event.schedule_start)
        elif isinstance(event, StepResultEvent) and (row := open_steps.pop(event.step_id, None)) is not None and row[1]:
            if event.execute_start is None or event.sample_end is None:
                continue
            rows.append(row)
            seconds.append(event.sample_end - event.execute_start)
            wake.append(event.update_start - event.sample_end)
            update.append(event.update_end - event.update_start)
    if len(rows) < _MIN_STEPS:
        raise ConfigError(f"the recording times {len(rows)} steps of the worker, a cost model needs at least {_MIN_STEPS}")
    cost = LinearCost(_fit_steps(rows, seconds, hidden_size=_hidden_size(recording.header.config)))
    host = HostCost(statistics.median(schedule), max(0.0, statistics.median(wake)), statistics.median(update))
    return cost, host, statistics.median(_relative_errors(cost, rows, seconds))


def _hidden_size(config: Mapping[str, Any]) -> int | None:
    """Of the recorded model; None: not told, or a model that is none."""
    model = config.get("model")
    numbers = [model.get(name) for name in ("num_heads", "head_dim")] if isinstance(model, dict) else []
    size = math.prod(number for number in numbers if isinstance(number, int)) if len(numbers) == 2 else 0
    return size if size >= _LEAST_HIDDEN_SIZE else None


def _fit_steps(rows: Sequence[Features], seconds: Sequence[float], *, hidden_size: int | None) -> tuple[float, ...]:
    """Short prompts tell little of what pairs of tokens cost, and long ones have many: a small error there would be a large one.

    So where the data is silent, pairs cost what their arithmetic says: 4 operations for each of `hidden_size` numbers in a layer, where
    a token has 24 for each square of it (the 12 weights of a layer of Llama's kind). They cost never less, and up to some times
    more as the data demands: the excess is expected to be about as much again.
    """
    found = non_negative_least_squares(rows, seconds)
    if hidden_size is None:
        return found
    ratio = 1 / (6 * hidden_size)
    tied = [(step, tokens + ratio * pairs, requests, sampled, pairs, context) for step, tokens, requests, sampled, pairs, context in rows]
    variance = statistics.fmean(error * error for error in _relative_errors(LinearCost(found), rows, seconds))
    excess = ratio * (found[1] + ratio * found[4])
    penalties = (0.0, 0.0, 0.0, 0.0, variance / excess**2 if excess else 0.0, 0.0)
    step, tokens, requests, sampled, pairs, context = non_negative_least_squares(tied, seconds, penalties=penalties)
    return step, tokens, requests, sampled, pairs + ratio * tokens, context


def _relative_errors(cost: StepCost, rows: Sequence[Features], seconds: Sequence[float]) -> list[float]:
    return [abs(cost(row) - second) / max(second, _LEAST_S) for row, second in zip(rows, seconds, strict=True)]


def non_negative_least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], *, penalties: Sequence[float] = ()
) -> tuple[float, ...]:
    """Weights >= 0 of least squared relative error, by coordinate descent on the normal equations (convex: it finds the minimum).

    penalties: for each weight what its square costs beside the squared errors; none by default.
    """
    size = len(rows[0])
    scales = [max(row[column] for row in rows) or 1.0 for column in range(size)]
    gram = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, second in zip(rows, seconds, strict=True):
        weight = 1 / max(second, _LEAST_S)
        scaled = [value / scale * weight for value, scale in zip(row, scales, strict=True)]
        for i in range(size):
            right[i] += scaled[i]
            for j in range(size):
                gram[i][j] += scaled[i] * scaled[j]
    for i, penalty in enumerate(penalties):
        gram[i][i] += penalty / scales[i] ** 2
    found = [0.0] * size
    for _ in range(_ROUNDS):
        for i in range(size):
            if gram[i][i]:
                rest = right[i] - sum(gram[i][j] * found[j] for j in range(size) if j != i)
                found[i] = max(0.0, rest / gram[i][i])
    return tuple(value / scale for value, scale in zip(found, scales, strict=True))
