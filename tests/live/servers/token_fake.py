"""Servers in the event loop of a test that tell the ids of their tokens: as vLLM and our own server write them.

The model says one text, whatever it is asked, by tokens of a byte each: most characters of the text are several.
Texts of tokens are made by vLLM's way (`tokenizers.decoders.DecodeStream`), or by our own gateway's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from isthmus.live.gateway.detokenizer import StopMatcher
from isthmus.live.gateway.tokenizer import BYTE_OF_CHAR, GatewayTokenizer, GenerationDefaults

from .plain_fake import METRICS, FakeServer

SAID = 'On “the” sea, 😀 a — ship\n\nnaïve, "token_ids":[1,2], and END'
"""What the model says; a token that ends it follows."""
TEMPLATE = "<user>{}<bot>"
END_OF_PROMPT = ord(">")
"""A token that prompts end with, and the model never says."""


@cache
def tokenizer() -> GatewayTokenizer:
    vocabulary = dict(BYTE_OF_CHAR.items())
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return GatewayTokenizer(made, None, GenerationDefaults(eos=(256,)))


def ids_of(text: str) -> list[int]:
    return tokenizer().encode_text(text)


class TokenServer(FakeServer):
    """`kind`: vllm or isthmus; `cuts`: shared by the servers of a test, one for each streamed answer: after so many
    bytes the connection breaks off, None lets it come whole; `batch`: tokens of an event."""

    def __init__(self, kind: str, cuts: list[int | None], *, batch: int = 1, said: str | bytes = SAID) -> None:
        super().__init__("m", metrics=METRICS if kind == "vllm" else "")
        self.entries = {"m": {"owned_by": kind}}
        self.kind, self.cuts, self.batch, self.said = kind, cuts, batch, said
        self.most = 0
        """Tokens of any answer; 0: as asked for."""

    async def _say(self, writer: asyncio.StreamWriter, target: str, asked: dict[str, Any]) -> None:
        is_probe = asked.get("max_tokens") == 1  # the router's own
        cut = self.cuts.pop(0) if self.cuts and not is_probe else None
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n")
        num_sent = 0
        for event in self.stream(target, asked):
            part = event if cut is None else event[: max(0, cut - num_sent)]
            num_sent += len(part)
            if part:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            if cut is not None and num_sent >= cut:
                return writer.close()
            await self.gate.wait()
        writer.write(b"0\r\n\r\n")
        return None

    def stream(self, target: str, asked: dict[str, Any]) -> Iterator[bytes]:
        """The events of an answer."""
        is_chat = target.startswith("/v1/chat")
        prompt = ids_of(TEMPLATE.format(asked["messages"][-1]["content"])) if is_chat else asked["prompt"]
        prompt = ids_of(prompt) if isinstance(prompt, str) else prompt
        script = [*(ids_of(self.said) if isinstance(self.said, str) else self.said), 256]
        num_said = prompt[::-1].index(END_OF_PROMPT) if END_OF_PROMPT in prompt else 0  # by another server
        limit = self.most or asked.get("max_tokens") or (None if is_chat else 16)
        rest = script[num_said:][:limit] or [256]
        reason = "stop" if rest[-1:] == [256] else "length"
        texts = (self._vllm if self.kind == "vllm" else self._ours)(prompt, rest, asked)
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = {"id": f"{self.port}", "object": kind, "created": self.port, "model": asked["model"]}
        told = bool(asked.get("return_token_ids"))
        if is_chat:
            yield self._event(head, {"delta": {"role": "assistant", "content": ""}}, told, None, prompt)
        num_tokens = 0
        tokens, said = list[int](), ""
        for at, (text, is_stopped) in enumerate(texts):
            finish = "stop" if is_stopped else reason if at == len(rest) - 1 else None
            num_tokens += 1
            tokens, said = [*tokens, rest[at]], said + text
            if len(tokens) < self.batch and not finish:
                continue
            first = prompt if num_tokens == len(tokens) and not is_chat else None
            if said or finish or told or self.kind == "vllm":
                yield self._event(head, self._said(said, is_chat=is_chat), told, tokens, first, finish)
            tokens, said = [], ""
            if finish:
                break
        counts = (len(prompt), num_tokens, len(prompt) + num_tokens)
        usage = dict(zip(("prompt_tokens", "completion_tokens", "total_tokens"), counts, strict=True))
        if (asked.get("stream_options") or {}).get("include_usage"):
            yield _data(head | {"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _said(self, text: str, *, is_chat: bool) -> dict[str, Any]:
        if is_chat:
            return {"delta": {"content": text} if text or self.kind == "vllm" else {}}
        return {"text": text}

    def _event(
        self, head: dict[str, Any], said: dict[str, Any], told: bool, tokens: list[int] | None,
        prompt: list[int] | None, finish: str | None = None,
    ) -> bytes:  # fmt: skip
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        event = head | {"choices": [choice]}
        is_role, is_chat, is_vllm = tokens is None, "delta" in said, self.kind == "vllm"
        if is_vllm and (finish or not is_chat):
            choice["stop_reason"] = None
        if is_chat and is_role and (told or is_vllm):
            event["prompt_token_ids"] = prompt if told else None
        if not is_chat and (is_vllm or (told and prompt)):
            choice["prompt_token_ids"] = prompt if told else None
        if not is_role and (told or is_vllm):
            choice["token_ids"] = tokens if told else None
        return _data(event)

    def _vllm(self, prompt: list[int], rest: list[int], asked: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        """The text of each token, and whether a stop string ends the answer."""
        stops = asked.get("stop") or []
        is_shown = bool(asked.get("include_stop_str_in_output"))
        stream, text, sent = DecodeStream(ids=prompt, skip_special_tokens=True), "", 0
        held = 0 if is_shown else max(map(len, stops), default=1) - 1
        for at, token in enumerate(rest):
            before = len(text)
            text += ("" if token == 256 else stream.step(tokenizer()._tokenizer, token)) or ""
            begins = {stop: text.find(stop, max(0, before - len(stop) + 1)) for stop in stops}
            found = [(begin + len(stop), begin) for stop, begin in begins.items() if begin >= 0]
            is_stopped = bool(found) and before < len(text)
            if is_stopped:
                text = text[: min(found)[0 if is_shown else 1]]
            end = len(text) - (0 if is_stopped or at == len(rest) - 1 else held)
            yield text[sent : max(sent, end)], is_stopped
            sent = max(sent, end)

    def _ours(self, prompt: list[int], rest: list[int], asked: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        stops = StopMatcher(asked.get("stop") or [], shown=bool(asked.get("include_stop_str_in_output")))
        detokenizer = tokenizer().detokenizer(prompt)
        for at, token in enumerate(rest):
            text = "" if token == 256 else detokenizer.push(token)
            if at == len(rest) - 1:
                text += detokenizer.flush()
            shown = stops.push(text)
            yield shown + (stops.flush() if at == len(rest) - 1 else ""), stops.matched


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
