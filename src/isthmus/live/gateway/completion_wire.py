"""Answers of /v1/completions, as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import TokenLogprobs
from isthmus.live.gateway.choice import Choice, Delta
from isthmus.live.gateway.wire import (
    ChunkDialect,
    PromptScores,
    Usage,
    encode,
    event,
    finite,
    token_text,
)


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
