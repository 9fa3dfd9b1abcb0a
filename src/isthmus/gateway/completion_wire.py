"""Answers of /v1/completions, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.gateway.choice import Choice, Delta, Score
from isthmus.gateway.prepare import PreparedRequest
from isthmus.gateway.wire import Usage, encode, event, finite, token_text


class CompletionLogprobs(msgspec.Struct):
    """`text_offset`: where in the answer's text each token begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct):
    """Also a chunk: the two have the same shape here."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class CompletionDialect:
    """`token_bytes`: the bytes a token id stands for."""

    def __init__(self, prepared: PreparedRequest, token_bytes: Callable[[int], bytes]) -> None:
        self._prepared = prepared
        self._token_bytes = token_bytes
        self._opened: set[int] = set()  # choices of which something was sent

    def events(self, choice: Choice, delta: Delta) -> bytes:
        if not (delta.text or delta.finish or delta.scores or self._prepared.return_token_ids):
            return b""
        first = choice.index not in self._opened
        self._opened.add(choice.index)
        return event(encode(self._body([self._choice(choice, delta, first=first)], None)))

    def usage_event(self, usage: Usage) -> bytes:
        return event(encode(self._body([], usage)))

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        body = self._body([self._choice(choice, whole, first=True) for choice, whole in choices], usage)
        body.usage = usage
        return encode(body)

    def _body(self, choices: list[CompletionChoice], usage: Usage | None) -> CompletionReply:
        prepared = self._prepared
        return CompletionReply(
            id=prepared.id,
            created=prepared.created_s,
            model=prepared.model,
            choices=choices,
            usage=usage if prepared.include_usage else UNSET,
        )

    def _choice(self, choice: Choice, delta: Delta, *, first: bool) -> CompletionChoice:
        ids = self._prepared.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=delta.text,
            logprobs=self._logprobs(delta.scores) if delta.scores else None,
            finish_reason=delta.finish,
            token_ids=delta.tokens if ids else UNSET,
            prompt_token_ids=choice.job.tokens if ids and first else UNSET,
        )

    def _logprobs(self, scores: Sequence[Score]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._text(score.token) for score in scores],
            token_logprobs=[finite(score.logprobs.chosen) for score in scores],
            top_logprobs=[self._top(score) for score in scores],
            text_offset=[score.offset for score in scores],
        )

    def _top(self, score: Score) -> dict[str, float]:
        """The most likely tokens, and always the chosen one; so there may be one more than asked for."""
        top = {self._text(token): finite(logprob) for token, logprob in score.logprobs.top}
        top.setdefault(self._text(score.token), finite(score.logprobs.chosen))
        return top

    def _text(self, token: int) -> str:
        return token_text(self._token_bytes(token), prefix="bytes:")
