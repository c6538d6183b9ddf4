"""JSON that fits a schema, whatever the model would rather say."""

import asyncio
import json

from aioengine import AsyncEngine, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "likes": {"enum": ["music", "books", "football"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


async def main() -> None:
    params = SamplingParams(max_tokens=100, temperature=0.9, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    async with AsyncEngine("smollm2") as engine:
        (output,) = await engine.generate_batch([[{"role": "user", "content": "Invent a person, as JSON."}]], params)
    person = json.loads(output.text)
    print(f"{person['name']}, {person['age']}, likes {person['likes']}")


if __name__ == "__main__":
    asyncio.run(main())
