"""The first token of a long conversation after a restart: computed again, and loaded from `kv_cache_dir`.

    python benchmarks/kv_cache_dir.py [--model smollm2] [--num-tokens 4096] [--turns 3]

Each turn starts an engine twice, without the folder and with it; starting is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time

from aioengine import AsyncEngine, SamplingParams


async def first_token_s(model: str, prompt: list[int], folder: str | None) -> tuple[float, list[int], int]:
    """Seconds from the call to the first token, the first eight tokens, and how many tokens of the prompt were not computed."""
    async with AsyncEngine(model, kv_cache_dir=folder, max_model_len=len(prompt) + 64) as engine:
        start = time.perf_counter()
        async with engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)) as stream:
            output = await anext(stream)
            seconds = time.perf_counter() - start
            async for output in stream:  # noqa: B007  # the last one is wanted
                pass
        return seconds, output.token_ids, output.num_cached_tokens


async def run(model: str, *, num_tokens: int, turns: int) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40_000) for _ in range(num_tokens)]
    computed: list[float] = []
    loaded: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        _, expected, _ = await first_token_s(model, prompt, folder)  # fills the folder
        for turn in range(turns):
            for kept, seconds in ((None, computed), (folder, loaded)):
                taken, token_ids, num_cached = await first_token_s(model, prompt, kept)
                if token_ids != expected:
                    raise SystemExit(f"turn {turn}: tokens {token_ids}, at first {expected}")
                seconds.append(taken)
                print(
                    f"turn {turn}: {'loaded' if kept else 'computed'} {taken:.3f} s, {num_cached} of {num_tokens} tokens not computed",
                    flush=True,
                )
    slow, quick = statistics.median(computed), statistics.median(loaded)
    print(f"first token of {num_tokens} tokens: {slow:.3f} s computed, {quick:.3f} s loaded, {slow / quick:.1f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(run(args.model, num_tokens=args.num_tokens, turns=args.turns))


if __name__ == "__main__":
    main()
