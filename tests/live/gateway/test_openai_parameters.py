"""Every parameter of the calls of the `openai` client: answered, or refused by its name.

The client's own signatures say which there are, so a parameter that a new client brings fails here until it is placed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseCompletedEvent

from isthmus.live.gateway import GatewayTokenizer, create_app

from .fake import CARD, FakeBackend, fitting
from .server import serving

OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters that say how a request is sent."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
CALLED = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}

CHAT: dict[str, list[dict[str, Any]]] = {
    "model": [{}],
    "messages": [
        {"messages": [{"role": role, "content": "Be brief.", "name": "bob"}, {"role": "user", "content": "hi"}]}
        for role in ("system", "developer", "user", "assistant")
    ]
    + [{"messages": CALLED}, {"messages": CALLED, "tools": [TOOL]}],
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "logit_bias": [{"logit_bias": {"5": 1}}],
    "logprobs": [{"logprobs": True}],
    "max_completion_tokens": [{"max_completion_tokens": 40}],
    "max_tokens": [{"max_tokens": 40}, {"max_tokens": 40, "max_completion_tokens": 40}],
    "metadata": [{"metadata": {"a": "b"}}],
    "modalities": [{"modalities": ["text"]}],
    "n": [{"n": 2}],
    "parallel_tool_calls": [{"parallel_tool_calls": True}],
    "prediction": [{"prediction": {"type": "content", "content": "hello"}}],
    "presence_penalty": [{"presence_penalty": 0.5}],
    "prompt_cache_key": [{"prompt_cache_key": "k"}],
    "prompt_cache_options": [{"prompt_cache_options": {"mode": "implicit"}}],
    "prompt_cache_retention": [{"prompt_cache_retention": "24h"}],
    "reasoning_effort": [{"reasoning_effort": effort} for effort in ("none", "low", "high")],
    "response_format": [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
    ],
    "safety_identifier": [{"safety_identifier": "u"}],
    "seed": [{"seed": 3}],
    "service_tier": [{"service_tier": tier} for tier in ("auto", "default", "flex", "priority")],
    "stop": [{"stop": "x"}, {"stop": ["x", "y"]}],
    "store": [{"store": True}],
    "stream": [{"stream": True}],
    "stream_options": [STREAMED],
    "temperature": [{"temperature": 0}, {"temperature": 2}],
    "tool_choice": [{"tools": [TOOL], "tool_choice": choice} for choice in ("none", "auto", "required", NAMED)],
    "tools": [{"tools": [TOOL]}, {"tools": [TOOL], "stream": True}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 2}],
    "top_p": [{"top_p": 0.5}],
    "user": [{"user": "u"}],
    "verbosity": [{"verbosity": "low"}],
}
CHAT_REFUSED: dict[str, dict[str, Any]] = {
    "audio": {"audio": {"format": "mp3", "voice": "alloy"}},
    "function_call": {"function_call": {"name": "get_weather"}},
    "functions": {"functions": [TOOL["function"]]},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "web_search_options": {"web_search_options": {}},
}

COMPLETION: dict[str, list[dict[str, Any]]] = {
    "model": [{}],
    "prompt": [{"prompt": prompt} for prompt in ("a", ["a", "b"], [1, 2], [[1, 2], [3]])],
    "best_of": [{"best_of": 2, "n": 2}],
    "echo": [{"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}],
    "logprobs": [{"logprobs": 2}],
    "max_tokens": [{"max_tokens": 40}],
    "stream": [{"stream": True}],
} | {
    name: CHAT[name]
    for name in (
        "frequency_penalty",
        "logit_bias",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream_options",
        "temperature",
        "top_p",
        "user",
    )
}
COMPLETION_REFUSED = {"suffix": {"suffix": "the end"}}

CALLABLE = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
CALLED_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "How is the weather in Oslo?"}]},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"},
]
RESPONSE: dict[str, list[dict[str, Any]]] = {
    "model": [{}],
    "background": [{"background": False}],
    "include": [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}],
    "input": [
        {"input": [{"role": "user", "content": "hi"}]},
        {"input": [{"type": "message", "role": "developer", "content": "Be brief."}, *CALLED_ITEMS]},
    ],
    "instructions": [{"instructions": "Be brief."}],
    "max_output_tokens": [{"max_output_tokens": 40}],
    "max_tool_calls": [{"max_tool_calls": 3}],
    "parallel_tool_calls": [{"tools": [CALLABLE], "parallel_tool_calls": False}],
    "reasoning": [{"reasoning": {"effort": "low"}}],
    "stream_options": [{"stream": True, "stream_options": {"include_obfuscation": False}}],
    "text": [
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
    ],
    "tool_choice": [
        {"tools": [CALLABLE], "tool_choice": choice}
        for choice in ("none", "auto", "required", {"type": "function", "name": "get_weather"})
    ],
    "tools": [{"tools": [CALLABLE]}, {"tools": [CALLABLE], "stream": True}],
    "top_logprobs": [{"top_logprobs": 2}],
    "truncation": [{"truncation": "disabled"}, {"truncation": "auto"}],
} | {
    name: CHAT[name]
    for name in (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "temperature",
        "top_p",
        "user",
    )
}
RESPONSE_REFUSED: dict[str, dict[str, Any]] = {
    "access_programs": {"access_programs": {"cyber": "standard"}},
    "background_options": {"background_options": {"completion_window": "soonest"}},
    "context_management": {"context_management": [{"type": "compaction", "compact_threshold": 5}]},
    "conversation": {"conversation": "c"},
    "image": {"image": {"context_compression": "auto"}},
    "moderation": {"moderation": {"model": "omni-moderation-latest"}},
    "previous_response_id": {"previous_response_id": "r"},
    "prompt": {"prompt": {"id": "p"}},
}


def _parameters(create: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(create).parameters) - OF_THE_CLIENT


def _examples(answered: dict[str, list[dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(fields, id=f"{name}-{at}")
        for name, examples in answered.items()
        for at, fields in enumerate(examples)
    ]


def _call(create: Callable[..., Any], **fields: Any) -> None:
    """Sends the request and reads the whole answer."""
    answer = create(**fields)
    if isinstance(answer, Response):
        assert answer.status == "completed"
    elif fields.get("stream"):
        *_, last = answer
        assert isinstance(last, ChatCompletionChunk | Completion | ResponseCompletedEvent)
    else:
        assert len(answer.choices) >= fields.get("n", 1)


@pytest.fixture(scope="module")
def client(tokenizer: GatewayTokenizer) -> Iterator[OpenAI]:
    """Of a server with room for tools in a prompt."""
    backend = FakeBackend(fitting)
    backend.card = msgspec.structs.replace(CARD, max_length=4096)
    with (
        serving(create_app(backend, tokenizer)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def create_chat(client: OpenAI) -> Callable[..., Any]:
    usual = {"model": CARD.name, "messages": [{"role": "user", "content": "hi"}]}
    return lambda **fields: client.chat.completions.create(**usual | fields)


@pytest.fixture
def create_completion(client: OpenAI) -> Callable[..., Any]:
    return lambda **fields: client.completions.create(**{"model": CARD.name, "prompt": "hi"} | fields)


@pytest.fixture
def create_response(client: OpenAI) -> Callable[..., Any]:
    return lambda **fields: client.responses.create(**{"model": CARD.name, "input": "hi"} | fields)


def test_every_parameter_has_its_place(client: OpenAI) -> None:
    assert _parameters(client.chat.completions.create) == CHAT.keys() | CHAT_REFUSED.keys()
    assert _parameters(client.completions.create) == COMPLETION.keys() | COMPLETION_REFUSED.keys()
    assert _parameters(client.responses.create) == RESPONSE.keys() | RESPONSE_REFUSED.keys()


@pytest.mark.parametrize("fields", _examples(CHAT))
def test_chat(create_chat: Callable[..., Any], fields: dict[str, Any]) -> None:
    _call(create_chat, **fields)


@pytest.mark.parametrize("fields", _examples(COMPLETION))
def test_completion(create_completion: Callable[..., Any], fields: dict[str, Any]) -> None:
    _call(create_completion, **fields)


@pytest.mark.parametrize("fields", _examples(RESPONSE))
def test_response(create_response: Callable[..., Any], fields: dict[str, Any]) -> None:
    _call(create_response, **fields)


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_chat_refuses(create_chat: Callable[..., Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        create_chat(**CHAT_REFUSED[name])
    assert refusal.value.param == name


@pytest.mark.parametrize("name", COMPLETION_REFUSED)
def test_completion_refuses(create_completion: Callable[..., Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        create_completion(**COMPLETION_REFUSED[name])
    assert refusal.value.param == name


@pytest.mark.parametrize("name", RESPONSE_REFUSED)
def test_response_refuses(create_response: Callable[..., Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        create_response(**RESPONSE_REFUSED[name])
    assert refusal.value.param == name
