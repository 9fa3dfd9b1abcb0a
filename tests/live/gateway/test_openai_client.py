"""OpenAI's own client, over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from isthmus.core.errors import OverloadedError, UnavailableError
from isthmus.core.types import FinishReason

from . import folder
from .fake import HANG, FakeBackend, says

MODEL = "acme/tiny"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


NOW = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
TOOLS: Any = [{"type": "function", "function": NOW}]
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>'


def test_a_conversation_with_tools(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says([*folder.byte_tokens(CALL + "\n" + CALL), folder.EOS])
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="auto")
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert message.content is None and message.tool_calls is not None
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in message.tool_calls]
    assert [call.function.arguments for call in message.tool_calls] == ['{"zone": "CET"}'] * 2  # type: ignore[union-attr]
    backend.script = lambda _: says([*folder.byte_tokens("It is noon."), folder.EOS])
    conversation = [*MESSAGES, message, *results]
    answer = client.chat.completions.create(model=MODEL, messages=conversation, tools=TOOLS)
    assert answer.choices[0].message.content == "It is noon."


def test_calls_streamed(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: says([*folder.byte_tokens("Well. " + CALL), folder.EOS], per_batch=3)
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        pieces = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    [choice] = final.choices
    [call] = choice.message.tool_calls or []
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    assert (call.function.name, call.function.arguments) == ("now", '{"zone": "CET"}')
    assert len(pieces) > 3 and "".join(pieces) == '{"zone": "CET"}'


def test_errors(client: OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    backend.script = lambda _: [OverloadedError("full", retry_after_s=3)]
    with pytest.raises(openai.RateLimitError) as overloaded:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert overloaded.value.response.headers["retry-after"] == "3"
    backend.script = lambda _: [*says(folder.byte_tokens("ab"), finish=None), UnavailableError("node lost")]
    with client.responses.stream(model=MODEL, input="hi") as stream:
        *_, last = stream
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.output_text, last.response.error.message) == ("ab", "node lost")
    with pytest.raises(openai.APIError, match="node lost"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_closing_a_stream_cancels(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True) as stream:
        next(iter(stream))
    assert sorted(backend.wait_cancelled(2)) == sorted(job.request for job in backend.jobs)


def test_many_at_once(url: str, backend: FakeBackend) -> None:
    """Each stream gets its own prompt back."""
    backend.script = lambda job: says(job.tokens, FinishReason.LENGTH)

    async def one(client: AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(model=MODEL, prompt=f"prompt {number}", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    assert asyncio.run(scenario()) == [f"prompt {number}" for number in range(20)]
