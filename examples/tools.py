"""A model calls a function, through OpenAI's client. Start a server first: aioengine serve smollm2"""

import json
import os
from typing import Any

from openai import OpenAI

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> str:
    return f"It is {len(city) * 4} degrees in {city}."


def main() -> None:
    client = OpenAI(base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    # "required" goes by a grammar over the tools' schemas: any model's call is valid.
    asked: Any = client.chat.completions.create(model="smollm2", messages=messages, tools=[WEATHER], tool_choice="required", temperature=0)
    first = asked.choices[0].message
    (call,) = first.tool_calls
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")
    messages += [first.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    print(client.chat.completions.create(model="smollm2", messages=messages, max_tokens=40).choices[0].message.content)


if __name__ == "__main__":
    main()
