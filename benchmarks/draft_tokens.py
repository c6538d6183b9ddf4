"""What draft tokens from n-grams gain, and what they cost where there are none.

    python benchmarks/draft_tokens.py --num-speculative-tokens 0 4 8 --batch 1 4 16

Each text is answered greedily by the built-in model, with each number of draft tokens in turn and that `--repeats` times, so that
a slow minute of the machine falls on all of them. Reported is the median of the output tokens a second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from dataclasses import dataclass, field

from aioengine import AsyncEngine, SamplingParams

PARAGRAPH = (
    "The lighthouse at Cape Verity was finished in 1862 by Ellen Marsh, who had drawn its lens herself. Its light was seen from "
    "thirty miles away, and the keepers wrote down every ship that passed. In the winter of 1889 a storm took the roof; Marsh's "
    "daughter Ada rebuilt it with copper from the wreck of the Morning Star."
)
CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
"""
TEXTS = {
    "repeat a paragraph": f"Repeat the following text word for word.\n\n{PARAGRAPH}",
    "edit code": f"Rewrite this Python code with `owner` renamed to `holder`. Answer with the code only.\n\n{CODE}",
    "open question": "Write a story about a fox who wants to learn how to paint.",
}


@dataclass(slots=True)
class Measured:
    rates: list[float] = field(default_factory=list)  # output tokens a second
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="exact")
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


async def answer(engine: AsyncEngine, text: str, *, batch: int, params: SamplingParams, measured: Measured) -> None:
    # A number of its own for each request, so that one is not the other's prefix.
    messages = [[{"role": "user", "content": f"{text}\n\n(request {index})"}] for index in range(batch)]
    before, start = engine.stats(), time.perf_counter()
    outputs = await engine.generate_batch(messages, params, progress=False)
    seconds = time.perf_counter() - start
    stats = engine.stats()
    measured.rates.append(sum(len(output.token_ids) for output in outputs) / seconds)
    measured.num_draft_tokens += stats.num_draft_tokens - before.num_draft_tokens
    measured.num_accepted_tokens += stats.num_accepted_tokens - before.num_accepted_tokens
    measured.token_ids = [output.token_ids for output in outputs]


async def main() -> None:
    args = parse_arguments()
    engines = {
        num_speculative_tokens: AsyncEngine(
            args.model,
            weights=args.weights,
            max_model_len=2048,
            enable_prefix_caching=False,
            num_speculative_tokens=num_speculative_tokens,
            num_threads=args.threads,  # a number: "all" is what the first engine of a process leaves to the others
        )
        for num_speculative_tokens in args.num_speculative_tokens
    }
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.max_tokens, ignore_eos=True)
    print(f"{'text':<20} {'batch':>5} {'drafted':>7} {'tokens/s':>9} {'gain':>6} {'accepted':>8} {'of':>6}  same output")
    for engine in engines.values():
        await engine.start()
        await answer(engine, "Hello", batch=1, params=params, measured=Measured())
    for name, text in TEXTS.items():
        for batch in args.batch:
            measured = {num_speculative_tokens: Measured() for num_speculative_tokens in engines}
            for _ in range(args.repeats):
                for num_speculative_tokens, engine in engines.items():
                    await answer(engine, text, batch=batch, params=params, measured=measured[num_speculative_tokens])
            base = measured[args.num_speculative_tokens[0]]
            for num_speculative_tokens, m in measured.items():
                rate = statistics.median(m.rates)
                share = f"{m.num_accepted_tokens / m.num_draft_tokens:.0%}" if m.num_draft_tokens else "-"
                gain = rate / statistics.median(base.rates)
                same = "yes" if m.token_ids == base.token_ids else "NO"
                print(
                    f"{name:<20} {batch:>5} {num_speculative_tokens:>7} {rate:>9.1f} {gain:>5.2f}x "
                    f"{share:>8} {m.num_draft_tokens:>6}  {same}",
                    flush=True,
                )
    for engine in engines.values():
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
