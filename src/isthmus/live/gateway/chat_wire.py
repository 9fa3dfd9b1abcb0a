"""Answers of /v1/chat/completions, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import FinishReason
from isthmus.live.gateway.choice import Choice, Delta
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.tool_use import CallReader
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content, Event
from isthmus.live.gateway.wire import (
    ChunkDialect,
    PromptScores,
    TokenBytes,
    TokenLogprob,
    Usage,
    encode,
    event,
    prompt_scores,
    scored,
    usage_field,
)


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """The first of a call has its id, type and name; all have a piece of its arguments."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class WrittenFunction(msgspec.Struct):
    """`arguments`: JSON as the model wrote it."""

    name: str
    arguments: str


class WrittenCall(msgspec.Struct):
    id: str
    function: WrittenFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """`content` is null where the answer is nothing but calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[WrittenCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptScores | UnsetType = UNSET
    object: str = "chat.completion"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatDialect(ChunkDialect):
    def __init__(self, prepared: PreparedRequest, token_bytes: TokenBytes) -> None:
        super().__init__(prepared, token_bytes)
        self._readers: dict[int, CallReader] = {}  # of choices in which calls may be

    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        opening = b"" if choice.index in self._opened else self._opening(choice, usage)
        tokens = delta.tokens if self._writing.token_ids else UNSET
        *pieces, last = self._pieces(choice, delta) or [ChatDelta()]
        if not (last.content or last.tool_calls or delta.finish or delta.scores or tokens):
            return opening
        before = [self._event([ChunkChoice(choice.index, piece)], usage) for piece in pieces]
        content = ChunkChoice(
            index=choice.index,
            delta=last,
            logprobs=self._logprobs(delta),
            finish_reason=self._finish(choice, delta),
            token_ids=tokens,
        )
        return b"".join([opening, *before, self._event([content], usage)])

    def usage_event(self, usage: Usage) -> bytes:
        return self._event([], usage)

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        prepared = self._prepared
        return encode(
            ChatReply(
                id=prepared.id,
                created=prepared.created_s,
                model=prepared.model,
                choices=[self._choice(choice, whole) for choice, whole in choices],
                usage=usage,
                prompt_logprobs=self._prompt_logprobs(choices[0][1]),
                prompt_token_ids=prepared.prompts[0] if self._writing.token_ids else UNSET,
            )
        )

    def _opening(self, choice: Choice, usage: Usage | None) -> bytes:
        """The event that names the role; the very first also carries the prompt's ids, where asked for."""
        first = not self._opened
        self._opened.add(choice.index)
        ids = self._prepared.prompts[0] if first and self._writing.token_ids else UNSET
        # An answer that may be nothing but calls must not begin with content.
        content = ChunkChoice(choice.index, ChatDelta("assistant", None if self._prepared.tools else ""))
        return self._event([content], usage, prompt_token_ids=ids)

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None,
        prompt_token_ids: Sequence[int] | UnsetType = UNSET,
    ) -> bytes:
        prepared = self._prepared
        chunk = ChatChunk(
            id=prepared.id,
            created=prepared.created_s,
            model=prepared.model,
            choices=choices,
            usage=usage_field(prepared, usage),
            prompt_token_ids=prompt_token_ids,
        )
        return event(encode(chunk))

    def _pieces(self, choice: Choice, delta: Delta) -> list[ChatDelta]:
        """What the delta's text adds: content, or a part of one call, each by itself, since not all clients look for
        more than one."""
        if self._prepared.tools is None:
            return [ChatDelta(content=delta.text)] if delta.text else []
        pieces: list[ChatDelta] = []
        for found in self._read(choice, delta):
            match found:
                case Content(text):
                    pieces.append(ChatDelta(content=text))
                case CallBegun(index, name):
                    begun = CallDelta(index, self._call_id(choice, index), "function", FunctionDelta(name, ""))
                    pieces.append(ChatDelta(tool_calls=[begun]))
                case Arguments(index, text):
                    pieces.append(
                        ChatDelta(tool_calls=[CallDelta(index, function=FunctionDelta(arguments=text))])
                    )
        return pieces

    def _read(self, choice: Choice, delta: Delta) -> Sequence[Event]:
        assert self._prepared.tools is not None
        reader = self._readers.setdefault(choice.index, self._prepared.tools.reader())
        return reader.push(delta.text, last=delta.finish is not None)

    def _call_id(self, choice: Choice, index: int) -> str:
        """Of one call; the answer's id makes it unique."""
        named = f"{self._prepared.id}/{choice.index}/{index}"
        return f"call_{blake2b(named.encode(), digest_size=12).hexdigest()}"

    def _finish(self, choice: Choice, delta: Delta) -> str | None:
        """`tool_calls` where the model ended its answer after calls. A client's stop string ends an answer as ever."""
        reader = self._readers.get(choice.index)
        called = reader is not None and reader.num_calls > 0
        ended = delta.finish is FinishReason.STOP and not choice.stopped
        return "tool_calls" if called and ended else delta.finish

    def _message(self, choice: Choice, whole: Delta) -> ChatMessage:
        if self._prepared.tools is None:
            return ChatMessage(whole.text)
        content, calls = "", []
        for found in self._read(choice, whole):
            match found:
                case Content(text):
                    content += text
                case CallBegun(index, name):
                    calls.append(WrittenCall(self._call_id(choice, index), WrittenFunction(name, "")))
                case Arguments(index, text):
                    calls[index].function.arguments += text
        return ChatMessage(content or None, tool_calls=calls) if calls else ChatMessage(content)

    def _choice(self, choice: Choice, whole: Delta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=self._message(choice, whole),
            logprobs=self._logprobs(whole),
            finish_reason=self._finish(choice, whole),
            token_ids=whole.tokens if self._writing.token_ids else UNSET,
        )

    def _prompt_logprobs(self, whole: Delta) -> PromptScores | UnsetType:
        most = self._writing.prompt_logprobs
        if most is None:
            return UNSET
        return prompt_scores(self._prepared.prompts[0], whole, most, self._token_bytes)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not delta.scores:
            return None
        as_ids = self._writing.tokens_as_ids
        return ChatLogprobs([scored(score, self._token_bytes, as_ids=as_ids) for score in delta.scores])
