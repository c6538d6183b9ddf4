"""A rule of your own for what may be sampled: this one forbids the token that came two places before, for variety."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from aioengine import AsyncEngine, SamplingParams


class NoEcho:
    """Named "module:class" in `logits_processors`. It sees all rows of a step at once, and its parameters in `extra_args`."""

    def __init__(self, config: Any) -> None:
        """config: the engine's `ResolvedConfig`."""

    def is_argmax_invariant(self) -> bool:
        return False  # it changes which token is the most likely one, so greedy requests need it too

    def apply(self, logits: torch.Tensor, rows: Sequence[Any]) -> torch.Tensor:
        for i, row in enumerate(rows):
            if (row.sampling_params.extra_args or {}).get("no_echo") and len(row.output_token_ids) >= 2:
                logits[i, int(row.output_token_ids[-2])] = float("-inf")
        return logits


async def main() -> None:
    async with AsyncEngine("smollm2", logits_processors=["logits_processor:NoEcho"]) as engine:
        for no_echo in (False, True):
            params = SamplingParams(max_tokens=16, extra_args={"no_echo": no_echo})
            (output,) = await engine.generate_batch(["very very very"], params)
            print(f"no_echo={no_echo}: {output.text!r}")


if __name__ == "__main__":
    asyncio.run(main())
