"""Tokens of prompts that pass: as the served model's own server makes them, or none."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from isthmus.cli.models import bytes_folder
from isthmus.live.gateway.passing import create_passing_app
from isthmus.live.gateway.prompt_tokens import INLINE_BYTES, PromptTokens
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tokenizer import GatewayTokenizer

from .server import Front, fronted, post
from .test_passing import Backend

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT = "once upon a time"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TOKENIZER = GatewayTokenizer.load(bytes_folder())


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend()


@pytest.fixture(scope="module")
def front(backend: Backend) -> Iterator[Front]:
    prompt_tokens = PromptTokens(bytes_folder(), GatewaySettings())
    try:
        with fronted(create_passing_app(backend, GatewaySettings(), prompt_tokens)) as found:
            yield found
    finally:
        prompt_tokens.close()


def tokens(front: Front, backend: Backend, path: str, body: Any) -> list[int]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert front.ask(post(path, data)).status == 203
    assert backend.passed[-1].body == data, "it passes unchanged"
    return array("I", backend.passed[-1].tokens).tolist()


def test_a_prompt_has_the_tokens_of_its_text_or_its_own(front: Front, backend: Backend) -> None:
    expected = TOKENIZER.encode_text(TEXT)
    assert tokens(front, backend, COMPLETION, {"prompt": TEXT, "vendor": 1}) == expected
    assert tokens(front, backend, COMPLETION, {"prompt": [5, 6, 7]}) == [5, 6, 7]


@pytest.mark.parametrize("count", [1, 2 * INLINE_BYTES // len(TEXT)])
def test_a_conversation_has_the_tokens_of_the_chat_template(front: Front, backend: Backend, count: int) -> None:
    """Short ones are read in the event loop, long ones in a process that may die."""
    messages = [MESSAGES[0], {"role": "user", "content": TEXT * count}]
    expected = TOKENIZER.encode_chat(messages)
    assert tokens(front, backend, CHAT, {"messages": messages, "vendor_field": {"x": 1}}) == expected
    with_tools = tokens(front, backend, CHAT, {"messages": messages, "tools": TOOLS, "tool_choice": "auto"})
    assert with_tools == TOKENIZER.encode_chat(messages, tools=TOOLS) != expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}),
        (CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": 5}),
        (CHAT, {"model": "m"}),
        (COMPLETION, {"prompt": ["one", "two"]}),
        (COMPLETION, {"prompt": [-1]}),
        (COMPLETION, {"prompt": [1 << 32]}),
        (COMPLETION, {"prompt": TEXT, "truncate_prompt_tokens": 5}),
        (COMPLETION, b"no JSON"),
        (COMPLETION, b""),
        ("/v1/embeddings", {"input": TEXT}),
    ],
)
def test_what_the_tokenizer_cannot_know_has_no_tokens_and_passes(
    front: Front, backend: Backend, path: str, body: Any
) -> None:
    assert tokens(front, backend, path, body) == []


def test_the_clients_salt_is_told(front: Front, backend: Backend) -> None:
    assert tokens(front, backend, COMPLETION, {"prompt": TEXT, "cache_salt": "s"})
    assert backend.passed[-1].cache_salt == backend.passed[-1].salt == "s"
