"""Text as it comes. Leaving the loop ends the request."""

import asyncio

from aioengine import AsyncEngine, SamplingParams


async def main() -> None:
    async with AsyncEngine("smollm2") as engine:
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=1)
        async for output in engine.generate([{"role": "user", "content": "Tell me about the sea."}], params):
            print(output.text_delta, end="", flush=True)
        print(f"\n[{output.finish_reason}, first token after {output.metrics.time_to_first_token_s:.2f} s]")


if __name__ == "__main__":
    asyncio.run(main())
