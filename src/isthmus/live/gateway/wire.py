"""What the answers of both endpoints share: usage, event framing, and log-probability text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import Reuse
from isthmus.live.gateway.choice import Choice, Delta, Score
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.problems import problem_json

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
