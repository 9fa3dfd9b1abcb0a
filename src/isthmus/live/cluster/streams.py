"""The answer of one accepted request: orders the tokens that nodes send, over all attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec.structs import replace

from isthmus.core.conductor import Refuse
from isthmus.core.errors import (
    IsthmusError,
    OverloadedError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from isthmus.core.types import Generated, Job, RequestId, TokenLogprobs


class AnswerStream:
    """Async iterator over batches of tokens, in order and without gaps, over all attempts of the request.

    Ends after the token with a finish reason; raises the IsthmusError the request failed with.
    """

    def __init__(self, job: Job, cancel: Callable[[RequestId], None]) -> None:
        self.job, self._cancel = job, cancel
        self._tokens: list[int] = []
        self._scores: list[TokenLogprobs] = []  # of the prompt, as far as this attempt has computed it
        self._early: dict[int, Generated] = {}  # decode's token may overtake the prefill's first one
        self._ready: list[Generated] = []
        self.error: IsthmusError | None = None
        """Raised after the tokens that came before it."""
        self._over = False
        self._wake = asyncio.Event()

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def end_attempt(self) -> None:
        """Discards tokens that came out of order, and scores: the next attempt computes them again."""
        self._early.clear()
        self._scores.clear()

    def score(self, first: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Takes scores of the prompt, as in `messages.Scores`. Raises ProtocolError when earlier ones are missing."""
        if first > len(self._scores):
            raise ProtocolError(f"scores from {first} on follow {len(self._scores)}")
        self._scores[first:] = logprobs

    def deliver(self, token: Generated) -> bool:
        """Takes a token from a node, in any order; returns True when the answer is complete. Raises ProtocolError for a
        first token without the scores of its prompt."""
        if token.index == 0 and not self._tokens and self.job.sampling.prompt_logprobs is not None:
            token = replace(token, prompt_logprobs=self._all_scores())
        self._early[token.index] = token
        while (following := self._early.pop(len(self._tokens), None)) is not None:
            self._tokens.append(following.token)
            self._ready.append(following)
            self._over = following.finish is not None
            self._wake.set()
        return self._over

    def _all_scores(self) -> tuple[TokenLogprobs, ...]:
        found, expected = tuple(self._scores), len(self.job.tokens) - 1
        if len(found) != expected:
            raise ProtocolError(f"a first token with {len(found)} scores of the prompt, not {expected}")
        self._scores.clear()
        return found

    def fail(self, error: IsthmusError) -> None:
        self.error = error
        self._wake.set()

    def cancel(self) -> None:
        """Cancels the request. No effect after its end."""
        self._cancel(self.job.request)

    async def __aiter__(self) -> AsyncIterator[Sequence[Generated]]:
        while True:
            if self._ready:
                ready, self._ready = self._ready, []
                yield ready
            elif self.error is not None:
                raise self.error
            elif self._over:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


def refusal(refuse: Refuse) -> IsthmusError:
    """Returns the error that the client of a refused request gets."""
    if refuse.code == "overloaded":
        return OverloadedError(refuse.reason, retry_after_s=_seconds(refuse))
    if refuse.code == "too_long":
        return RequestError(refuse.reason, param="max_tokens", code="context_length_exceeded")
    return UnavailableError(refuse.reason, retry_after_s=_seconds(refuse))


def _seconds(refuse: Refuse) -> int:
    """Returns the time to retry after in whole seconds, at least one."""
    return max(1, -(-refuse.retry_after_ms // 1000))
