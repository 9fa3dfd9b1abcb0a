"""Answers of /v1/chat/completions and /v1/completions, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import TokenLogprobs
from isthmus.live.gateway.choice import Choice, Delta
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content, Finding
from isthmus.live.gateway.wire import (
    ChunkDialect,
    PromptScores,
    TokenBytes,
    TokenLogprob,
    Usage,
    encode,
    event,
    finite,
    scored,
    token_text,
)


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


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
    """A chunk is a dict: nothing but this writes one, and no document describes events."""

    def __init__(self, prepared: PreparedRequest, token_bytes: TokenBytes) -> None:
        super().__init__(prepared, token_bytes)
        self._head = {"id": prepared.id, "created": prepared.created_s, "model": prepared.model}
        self._tail: dict[str, Any] = {"object": "chat.completion.chunk"}

    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        opening = b"" if choice.index in self._opened else self._opening(choice, usage)
        *before, last = self._pieces(choice, delta) or [{}]
        content = self._chunk(choice, last)
        if self._writing.token_ids:
            content["token_ids"] = delta.tokens
        if not (last or delta.finish or delta.scores or content.get("token_ids")):
            return opening
        content["logprobs"] = self._logprobs(delta)
        content["finish_reason"] = self._finish(choice, delta)
        events = [self._event([self._chunk(choice, piece)], usage) for piece in before]
        return b"".join([opening, *events, self._event([content], usage)])

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        prepared = self._prepared
        return encode(
            ChatReply(
                id=prepared.id,
                created=prepared.created_s,
                model=prepared.model,
                choices=[self._choice(choice, whole) for choice, whole in choices],
                usage=usage,
                prompt_logprobs=self._prompt_logprobs(*choices[0]),
                prompt_token_ids=prepared.prompts[0] if self._writing.token_ids else UNSET,
            )
        )

    def _opening(self, choice: Choice, usage: Usage | None) -> bytes:
        """The first event of a choice; the first of all repeats the prompt if it is asked for."""
        is_first = not self._opened
        self._opened.add(choice.index)
        prompt = {"prompt_token_ids": self._prepared.prompts[0]} if is_first and self._writing.token_ids else {}
        # An answer that may be nothing but calls must not begin with content.
        said = {"role": "assistant"} if self._prepared.tools else {"role": "assistant", "content": ""}
        return self._event([self._chunk(choice, said)], usage, **prompt)

    @staticmethod
    def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _event(self, choices: list[Any], usage: Usage | None, **more: Any) -> bytes:
        body = {**self._head, "choices": choices, **self._tail, **more}
        if self._writing.counts:
            body["usage"] = usage
        return event(encode(body))

    def _pieces(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """What a batch adds to the message, an event for each; that of the tokens themselves is the last."""
        if delta.found is None:
            return [{"content": delta.text}] if delta.text else []
        return [self._piece(choice, found) for found in delta.found]

    def _piece(self, choice: Choice, found: Finding) -> dict[str, Any]:
        match found:
            case Content(text):
                return {"content": text}
            case CallBegun(index, name):
                called = {"id": self._call_id(choice, index), "type": "function"}
                return {"tool_calls": [{"index": index, **called, "function": {"name": name, "arguments": ""}}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _call_id(self, choice: Choice, index: int) -> str:
        """Of one call; the answer's id makes it unique."""
        named = f"{self._prepared.id}/{choice.index}/{index}"
        return f"call_{blake2b(named.encode(), digest_size=12).hexdigest()}"

    def _finish(self, choice: Choice, delta: Delta) -> str | None:
        return "tool_calls" if delta.finish and choice.ended_with_calls else delta.finish

    def _message(self, choice: Choice, whole: Delta) -> ChatMessage:
        if whole.found is None:
            return ChatMessage(whole.text)
        content, calls = "", []
        for found in whole.found:
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

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not delta.scores:
            return None
        as_ids = self._writing.tokens_as_ids
        return ChatLogprobs([scored(score, self._token_bytes, as_ids=as_ids) for score in delta.scores])


class CompletionLogprobs(msgspec.Struct):
    """`text_offset`: where in the answer's text each token begins, in characters; of one amid a character, where that
    begins. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET


class CompletionReply(msgspec.Struct):
    """Also a chunk: the two have the same shape here."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class CompletionDialect(ChunkDialect):
    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        first = choice.index not in self._opened
        echoes = first and self._writing.echo
        if not (delta.text or delta.finish or delta.scores or self._writing.token_ids or echoes):
            return b""
        self._opened.add(choice.index)
        return self._event([self._choice(choice, delta, first=first)], usage)

    def _event(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return event(encode(self._body(choices, usage if self._writing.counts else UNSET)))

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        body = self._body([self._choice(choice, whole, first=True) for choice, whole in choices], usage)
        for written, (choice, whole) in zip(body.choices, choices, strict=True):
            written.prompt_logprobs = self._prompt_logprobs(choice, whole)
        return encode(body)

    def _body(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionReply:
        prepared = self._prepared
        return CompletionReply(
            id=prepared.id,
            created=prepared.created_s,
            model=prepared.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, choice: Choice, delta: Delta, *, first: bool) -> CompletionChoice:
        ids, echoes = self._writing.token_ids, self._writing.echo
        echo = self._echo(choice) if echoes and first else ""
        return CompletionChoice(
            index=choice.index,
            text=echo + delta.text,
            logprobs=self._logprobs(choice, delta, first=first),
            finish_reason=delta.finish,
            token_ids=delta.tokens if ids else UNSET,
            prompt_token_ids=choice.job.tokens if ids and first else UNSET,
        )

    def _echo(self, choice: Choice) -> str:
        return self._prepared.texts[choice.index // self._prepared.n]

    def _logprobs(self, choice: Choice, delta: Delta, *, first: bool) -> CompletionLogprobs | None:
        echoes = self._writing.echo
        if choice.job.sampling.logprobs is None or not (delta.scores or (echoes and first)):
            return None
        shift = len(self._echo(choice)) if echoes else 0
        written = CompletionLogprobs(
            tokens=[self._text(score.token) for score in delta.scores],
            token_logprobs=[finite(score.logprobs.chosen) for score in delta.scores],
            top_logprobs=[self._top(score.token, score.logprobs) for score in delta.scores],
            text_offset=[shift + score.offset for score in delta.scores],
        )
        if echoes and first:
            self._score_prompt(written, choice, delta)
        return written

    def _score_prompt(self, written: CompletionLogprobs, choice: Choice, delta: Delta) -> None:
        """Puts the echoed prompt's tokens before the answer's."""
        prompt, scores = choice.job.tokens, delta.prompt_scores or ()
        written.tokens[:0] = [self._text(token) for token in prompt]
        written.token_logprobs[:0] = [None, *(finite(each.chosen) for each in scores)]
        written.top_logprobs[:0] = [None, *(self._top(t, s) for t, s in zip(prompt[1:], scores, strict=True))]
        written.text_offset[:0] = self._prepared.offsets[choice.index // self._prepared.n]

    def _top(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and always the one that came; so there may be one more than asked for."""
        top = {self._text(each): finite(logprob) for each, logprob in logprobs.top}
        top.setdefault(self._text(token), finite(logprobs.chosen))
        return top

    def _text(self, token: int) -> str:
        if self._writing.tokens_as_ids:
            return f"token_id:{token}"
        return token_text(self._token_bytes(token), prefix="bytes:")
