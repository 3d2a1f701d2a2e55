"""Agents in Python against benchmarks/clients/scripted.py: python3 agents_python.py CLIENT ADDRESS

Runs in the environment of the clients, without this project. Prints what the agent said at last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

MODEL, QUESTION = "scripted", "How warm is it?"


def temperature(city: str) -> str:
    """The temperature of a city."""
    return f"20 C in {city}"


def openai_agents(address: str) -> str:
    """Over /v1/responses and over chats, whole and streamed."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    async def run() -> set[str]:
        texts = set()
        for model in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
            tools = [agents.function_tool(temperature)]
            agent = agents.Agent("a", tools=tools, model=model(MODEL, client))
            texts.add((await agents.Runner.run(agent, QUESTION)).final_output)
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            texts.add(streamed.final_output)
        return texts

    return "; ".join(sorted(asyncio.run(run())))


def pydantic_ai(address: str) -> str:
    """Over chats, /v1/responses and /v1/messages; text and an object."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    class Weather(BaseModel):
        city: str
        degrees: int

    openai = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    texts = set()
    for model in (
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=AnthropicProvider(base_url=address, api_key="none")),
    ):
        texts.add(Agent(model, tools=[temperature]).run_sync(QUESTION).output)
        weather = Agent(model, output_type=Weather).run_sync(QUESTION).output
        if weather != Weather(city="Rome", degrees=20):
            raise ValueError(weather)
    return "; ".join(sorted(texts))


def instructor(address: str) -> str:
    """Objects by tools and by JSON schemas."""
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        degrees: int

    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    found = []
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        patched = library.from_openai(client, mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        weather = patched.chat.completions.create(
            model=MODEL, messages=messages, response_model=Weather
        )
        found.append(f"{weather.degrees} C in {weather.city}")
    return "; ".join(sorted(set(found)))


CLIENTS: dict[str, Callable[[str], str]] = {
    "openai_agents": openai_agents,
    "pydantic_ai": pydantic_ai,
    "instructor": instructor,
}

if __name__ == "__main__":
    print(CLIENTS[sys.argv[1]](sys.argv[2]))
