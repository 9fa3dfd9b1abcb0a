"""What the answers of both endpoints share: usage, event framing, and log-probability text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import Reuse, TokenLogprobs
from isthmus.live.gateway.choice import Choice, Delta, Score
from isthmus.live.gateway.http import problem_json
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content, Finding

DONE = b"data: [DONE]\n\n"
# JSON has no infinities. OpenAI writes this for tokens that cannot be.
LOWEST_LOGPROB = -9999.0

encode = msgspec.json.Encoder().encode
TokenBytes = Callable[[int], bytes]
"""The bytes that a token id stands for."""


class PromptDetails(msgspec.Struct, frozen=True):
    """`cached_tokens`: of the same prefix. The others, whose sum is the prompt, only of a request that may be computed
    with more than that: as in `isthmus.core.types.Reused`."""

    cached_tokens: int
    exact_tokens: int | UnsetType = UNSET
    moved_tokens: int | UnsetType = UNSET
    similar_tokens: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Dialect(Protocol):
    """How one endpoint writes the answer to one request. It may remember what it wrote."""

    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        """The SSE events for `delta`, with the usage so far if each has it; empty when it has nothing to show."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The last events of an answer that is whole."""
        ...

    def failure(self, error: Exception) -> bytes:
        """The last events of an answer that broke off."""
        ...

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed: `choices` by index, each with all it produced."""
        ...


class ChunkDialect(ABC):
    """What dialects share whose events are chunks of the answer, with [DONE] behind the last."""

    def __init__(self, prepared: PreparedRequest, token_bytes: TokenBytes) -> None:
        self._prepared, self._writing = prepared, prepared.writing
        self._token_bytes = token_bytes
        self._opened: set[int] = set()
        """Choices of which something was sent."""

    @abstractmethod
    def _event(self, choices: list[Any], usage: Usage | None) -> bytes:
        """One event, with `usage` where the client asked for it."""

    def end(self, usage: Usage) -> bytes:
        return (self._event([], usage) if self._writing.counts else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        return event(problem_json(error)) + DONE

    def _prompt_logprobs(self, choice: Choice, whole: Delta) -> PromptScores | UnsetType:
        most = self._writing.prompt_logprobs
        if most is None:
            return UNSET
        return prompt_scores(choice.job.tokens, whole, most, self._token_bytes)


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def usage_of(prepared: PreparedRequest, choices: Sequence[Choice]) -> Usage:
    """Each prompt counts once, however many choices continue it; where its KV came from is the first choice's."""
    prompt_tokens = sum(len(prompt) for prompt in prepared.prompts)
    completion_tokens = sum(choice.num_tokens for choice in choices)
    details = _prompt_details(choices[:: prepared.n], prepared.reuse)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _prompt_details(choices: Sequence[Choice], reuse: Reuse) -> PromptDetails:
    """`choices`: one of each prompt."""
    cached_tokens = sum(choice.cached_tokens for choice in choices)
    if reuse is Reuse.EXACT:
        return PromptDetails(cached_tokens)
    reused = [choice.reused for choice in choices]
    return PromptDetails(
        cached_tokens,
        exact_tokens=sum(each.exact for each in reused),
        moved_tokens=sum(each.moved for each in reused),
        similar_tokens=sum(each.similar for each in reused),
        recomputed_tokens=sum(each.recomputed for each in reused),
    )


class PromptScore(msgspec.Struct, frozen=True):
    """Of one token that could stand at one place of a prompt. `rank`: among all tokens, from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]
"""For each token of a prompt, by token id: its own and the most likely ones'. The first has none."""


def prompt_scores(prompt: Sequence[int], delta: Delta, most: int, token_bytes: TokenBytes) -> PromptScores:
    scores: PromptScores = [None]
    for token, logprobs in zip(prompt[1:], delta.prompt_scores or (), strict=True):
        places = {each: (logprob, rank) for rank, (each, logprob) in enumerate(logprobs.top[:most], start=1)}
        places.setdefault(token, (logprobs.chosen, logprobs.rank))
        scores.append(
            {
                str(each): PromptScore(finite(logprob), rank, token_text(token_bytes(each)))
                for each, (logprob, rank) in places.items()
            }
        )
    return scores


def finite(logprob: float) -> float:
    # Written so that NaN becomes the lowest too.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def token_text(raw: bytes, prefix: str = "") -> str:
    """A token as text; one that is only part of a character as `\\xe2\\x82`, behind `prefix`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


def scored(score: Score, token_bytes: TokenBytes, *, as_ids: bool) -> TokenLogprob:
    """`as_ids`: tokens are named by their ids."""

    def entry(token: int, logprob: float) -> TopLogprob:
        raw = token_bytes(token)
        text = f"token_id:{token}" if as_ids else token_text(raw)
        return TopLogprob(text, finite(logprob), list(raw))

    chosen = entry(score.token, score.logprobs.chosen)
    top = [entry(token, logprob) for token, logprob in score.logprobs.top]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


# Answers of /v1/chat/completions and /v1/completions, as OpenAI writes them.


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
