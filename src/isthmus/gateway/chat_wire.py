"""Answers of /v1/chat/completions, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.gateway.choice import Choice, Delta
from isthmus.gateway.logprobs import TokenLogprob, scored
from isthmus.gateway.wire import (
    ChunkDialect,
    PromptScores,
    Usage,
    encode,
    event,
    prompt_scores,
    usage_field,
)


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


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


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


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
    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        opening = b"" if choice.index in self._opened else self._opening(choice, usage)
        tokens = delta.tokens if self._writing.token_ids else UNSET
        if not (delta.text or delta.finish or delta.scores or tokens):
            return opening
        content = ChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish,
            token_ids=tokens,
        )
        return opening + self._event([content], usage)

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
        content = ChunkChoice(choice.index, ChatDelta("assistant", ""))
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

    def _choice(self, choice: Choice, whole: Delta) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(whole.text),
            logprobs=self._logprobs(whole),
            finish_reason=whole.finish,
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
