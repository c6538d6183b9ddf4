"""Custom logits processors: code of the user's between the model and the sampler, for all rows of a step at once.

A processor is a class (or any callable) named "module:name" in `EngineConfig.logits_processors`. It is called once, with the
`ResolvedConfig`, in the worker's thread, and gives an object with the two methods of `LogitsProcessor`:

    class NoDigits:
        def __init__(self, config: ResolvedConfig) -> None:
            self.digits = torch.tensor([17, 18, 19])

        def is_argmax_invariant(self) -> bool:
            return False

        def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
            for place, row in enumerate(rows):
                if row.sampling_params.extra_args.get("no_digits"):
                    logits[place, self.digits] = -torch.inf
            return logits

vLLM V1 tells a processor which rows were added, moved and removed (`update_state`). Here nothing is ever moved, and a step names
its rows in full: a processor that keeps state keys it by `req_id`, and may rely on a request's rows coming with growing
`output_token_ids`. After a preemption the request goes on where it was; with draft tokens a request has several rows in one
step, each with the tokens before it, and a draft token that was rejected does not come again.

What a processor does to a row should depend on that row alone, or the output depends on who runs beside it. Where one raises, or
gives something else than logits, it is called once more for each row of the step by itself: requests whose row it then fails for
end with an error that names it, the others go on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioengine.errors import ConfigError
from aioengine.resolved_config import ResolvedConfig
from aioengine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """One row of the logits: whose it is, and the tokens so far. Read-only views of the worker's table, valid during the call."""

    req_id: str
    sampling_params: SamplingParams
    prompt_token_ids: npt.NDArray[np.int32]  # [num_prompt_tokens]
    output_token_ids: npt.NDArray[np.int32]  # [num_output_tokens]


class LogitsProcessor(Protocol):
    """See the module."""

    def is_argmax_invariant(self) -> bool:
        """Asked once. True: it never changes which logit is the largest. It is then called for the rows that are not
        greedy alone, after temperature and min_p, and otherwise for all rows, after logit_bias and before penalties."""

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        """logits [n, vocab_size] float32, rows [n]. Returns logits of the same shape and dtype: the same tensor, changed in
        place, or another."""


@dataclass(frozen=True, slots=True)
class LoadedProcessor:
    """A processor, and the name that errors give."""

    name: str  # "module:name"
    processor: LogitsProcessor
    is_argmax_invariant: bool

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        """`logits` again, overwritten. Raises RuntimeError naming the processor if it fails."""
        try:
            result = self.processor.apply(logits, rows)
        except Exception as exc:
            raise RuntimeError(f"the logits processor {self.name} failed: {type(exc).__name__}: {exc}") from exc
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape or result.dtype != logits.dtype:
            raise RuntimeError(
                f"the logits processor {self.name} must return {logits.dtype} logits of shape {list(logits.shape)}, got {_describe(result)}"
            )
        if result is not logits:
            logits.copy_(result)
        return logits


def find_logits_processors(names: Sequence[str]) -> list[Callable[[ResolvedConfig], Any]]:
    """What "module:name" strings name. Raises ConfigError with the string that is not importable or not callable."""
    return [_find(name) for name in names]


def load_logits_processors(config: ResolvedConfig) -> list[LoadedProcessor]:
    """The processors of `config.worker.logits_processors`, in order.

    Raises ConfigError with the string of one that cannot be imported or built, or lacks a method.
    """
    names = config.worker.logits_processors
    loaded = []
    for name, make in zip(names, find_logits_processors(names), strict=True):
        try:
            processor = make(config)
            invariant = bool(processor.is_argmax_invariant())
        except Exception as exc:
            raise ConfigError(f"the logits processor {name!r} cannot be built: {type(exc).__name__}: {exc}") from exc
        if not callable(getattr(processor, "apply", None)):
            raise ConfigError(f"the logits processor {name!r} has no method apply(logits, rows)")
        loaded.append(LoadedProcessor(name, processor, invariant))
    return loaded


def _find(name: str) -> Callable[[ResolvedConfig], Any]:
    module, separator, attribute = name.partition(":")
    if not (module and separator and attribute):
        raise ConfigError(f'logits_processors must hold "module:name" strings, got {name!r}')
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"the logits processor {name!r} cannot be imported: {exc}") from exc
    if not callable(found):
        raise ConfigError(f"the logits processor {name!r} is a {type(found).__name__}, not a class or a function that makes one")
    if isinstance(found, type) and not all(callable(getattr(found, method, None)) for method in ("apply", "is_argmax_invariant")):
        raise ConfigError(f"the logits processor {name!r} needs the methods apply(logits, rows) and is_argmax_invariant()")
    return found


def _describe(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
