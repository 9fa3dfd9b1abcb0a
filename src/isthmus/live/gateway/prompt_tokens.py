"""The tokens of prompts that are passed on, as their server will make them, by the tokenizer of the served model.

A body without tokens is no error: the server judges bodies, and such a prompt is known by its text alone.
"""

from __future__ import annotations

import contextlib
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.types import Receive, Scope

from isthmus.core.errors import OverloadedError, RequestError, UnavailableError
from isthmus.core.types import ModelCard
from isthmus.live.gateway.headers import hex_id, terms_of
from isthmus.live.gateway.preparing import Preparing
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tokenizer import GatewayTokenizer

ANY_MODEL = ModelCard("", max_length=1 << 40, vocab_size=1 << 32, created_s=0)
"""The servers know what is too long for them."""
INLINE_BYTES = 8_000
"""A longer body is tokenised in a worker: the event loop has others to serve."""
REMEMBERED_BYTES = 16 << 20
"""Of conversations with their tokens, in the event loop and in each worker."""
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Completion(msgspec.Struct):
    prompt: str | list[Token]
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: None = None


class _Chat(msgspec.Struct, omit_defaults=True):
    """The fields of which a server makes the prompt; another value than None of the last ones needs what only the
    server has."""

    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    add_special_tokens: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: None = None
    chat_template: None = None
    reasoning_effort: None = None


_completion = msgspec.json.Decoder(_Completion).decode
_chat = msgspec.json.Decoder(_Chat).decode
_encode = msgspec.json.Encoder().encode


class PromptTokens:
    """Makes tokens of bodies: of short ones in the event loop, of long ones in processes that may die. `close` ends
    those."""

    def __init__(self, model: Path, settings: GatewaySettings) -> None:
        """`model`: a folder or a GGUF file with the tokenizer. Raises ModelError."""
        tokenizer = GatewayTokenizer.load(model)
        self.samples = _samples(tokenizer)
        """Questions for a server's `/tokenize`, without its model, and the tokens that it should answer."""
        tokenizer.remember(REMEMBERED_BYTES)
        settings = replace(settings, long_body_bytes=INLINE_BYTES, remembered_bytes=REMEMBERED_BYTES)
        self._preparing = Preparing(ANY_MODEL, tokenizer, settings, model)

    def open(self) -> None:
        """Starts the workers ahead of the first request."""
        self._preparing.open()

    def close(self) -> None:
        self._preparing.close()

    async def of(self, scope: Scope, body: bytes, receive: Receive) -> bytes:
        """Returns the tokens of a body, uint32 in this machine's order; none where they are not known. Raises
        ClientGoneError."""
        try:
            question = self._question(scope["path"], body)
            if not isinstance(question, bytes):
                return array("I", question).tobytes()
            if not question:
                return b""
            found: bytes = await self._preparing("tokens", question, hex_id(scope), terms_of(scope), receive)
            return found
        except (msgspec.DecodeError, RequestError, OverloadedError, UnavailableError, RecursionError):
            return b""

    def _question(self, path: str, body: bytes) -> bytes | list[int]:
        """Returns the part of a body that makes the prompt, as `/tokenize` takes it, or the tokens that it gives."""
        if path == _CHATS:
            chat = _chat(body)
            return _encode({name: raw for name in _FIELDS if (raw := getattr(chat, name))})
        if path != _COMPLETIONS:
            return b""
        completion = _completion(body)
        if isinstance(completion.prompt, list):
            return completion.prompt
        asked: dict[str, Any] = {"prompt": completion.prompt}
        if completion.add_special_tokens is not None:
            asked["add_special_tokens"] = completion.add_special_tokens
        return _encode(asked)


_TEXT = "Zwölf Boxkämpfer jagen Viktor quer über\n\t 1234567 = 0x12D687; \u6f22\u5b57, \U0001f9ed!"
_MESSAGES = [
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Go on."},
]


def _samples(tokenizer: GatewayTokenizer) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
    found: list[tuple[dict[str, Any], list[int]]] = [({"prompt": _TEXT}, tokenizer.encode_text(_TEXT))]
    with contextlib.suppress(RequestError):  # it has no chat template, or one that refuses them
        found.append(({"messages": _MESSAGES}, tokenizer.encode_chat(_MESSAGES)))
    return tuple([(_encode(body), tuple(tokens)) for body, tokens in found])


_FIELDS = [each for each in _Chat.__struct_fields__ if _Chat.__annotations__[each] == "msgspec.Raw"]
