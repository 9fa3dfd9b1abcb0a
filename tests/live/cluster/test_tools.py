"""Calls of tools from the default model: made to call, it calls, streamed or not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from tests.inside import inside

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the web",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "maxLength": 40},
                "most": {"type": "integer", "maximum": 9},
            },
            "required": ["query", "most"],
        },
    },
}
ASKED: Any = [{"role": "user", "content": "What is the weather like in Paris?"}]


def fits(name: str, written: str) -> bool:
    arguments = json.loads(written)
    if name == "get_weather":
        return isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit")
    return isinstance(arguments["query"], str) and arguments["most"] <= 9


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def test_the_default_model_calls_where_it_must() -> None:
    with inside({"engine": {"dtype": "float32", "kv_memory": "256MiB"}}) as served:
        client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        fields: Any = {"model": served.model, "tools": [WEATHER, SEARCH], "temperature": 0, "max_tokens": 128}
        forced: Any = {"messages": ASKED, "parallel_tool_calls": False, **fields}

        def streamed() -> Any:
            with client.chat.completions.stream(tool_choice="required", **forced) as stream:
                return stream.get_final_completion()

        with ThreadPoolExecutor(3) as pool:
            named = pool.submit(client.chat.completions.create, tool_choice=NAMED, **forced)
            required = pool.submit(client.chat.completions.create, tool_choice="required", **forced)
            in_pieces = pool.submit(streamed)
        assert called(named.result())[0] == "get_weather"
        assert called(required.result()) == called(in_pieces.result())
        # The conversation goes on with what came, and the result of it.
        message = named.result().choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "18 degrees and sunny"}
        after = client.chat.completions.create(
            messages=[*ASKED, message, result], **fields | {"max_tokens": 16}
        )
        assert after.choices[0].message.content


def called(answer: Any) -> tuple[str, str]:
    """The function and the arguments of an answer that is one call, which fits."""
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    assert fits(call.function.name, call.function.arguments)
    return call.function.name, call.function.arguments
