"""Many prompts at once, through one engine. The bar is on stderr, where that is a terminal."""

import asyncio

from aioengine import AsyncEngine, SamplingParams

ANIMALS = ("cat", "dog", "horse", "whale", "bee", "owl", "fox", "frog")


async def main() -> None:
    prompts = [[{"role": "user", "content": f"Describe a {animal} in one sentence."}] for animal in ANIMALS]
    async with AsyncEngine("smollm2", max_num_seqs=8) as engine:
        outputs = await engine.generate_batch(prompts, SamplingParams(max_tokens=24))
    for animal, output in zip(ANIMALS, outputs, strict=True):
        print(f"{animal}: {output.text.strip()}")


if __name__ == "__main__":
    asyncio.run(main())
