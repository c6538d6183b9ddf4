"""`openai-agents` against a running server: python openai_agents_client.py URL MODEL. Chats and responses, streamed or not."""

from __future__ import annotations

import asyncio
import sys

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

URL, MODEL = sys.argv[1:3]
CALLED: list[str] = []
# An answer that is cut off is no answer to the runner of responses.
BRIEF = ModelSettings(temperature=0, max_tokens=200, extra_body={"stop": ["."]})


@function_tool
def get_time() -> str:
    """The time"""
    CALLED.append("time")
    return "It is noon."


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=BRIEF)
        assert (await Runner.run(agent, "Say hi")).final_output
        streamed = Runner.run_streamed(agent, "Say hi")
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output
        settings = ModelSettings(
            temperature=0, max_tokens=200, extra_body={"stop": ["."]}, tool_choice="required", parallel_tool_calls=False
        )
        with_tool = Agent(name="b", instructions="Be brief.", model=model, model_settings=settings, tools=[get_time])
        CALLED.clear()
        assert (await Runner.run(with_tool, "What time is it?")).final_output
        assert CALLED == ["time"]
    print("openai-agents: ok")


asyncio.run(main())
