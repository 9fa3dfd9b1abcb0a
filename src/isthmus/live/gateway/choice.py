"""One choice of an answer: its stream of tokens becomes text, scores and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.core.errors import ProtocolError
from isthmus.core.types import FinishReason, Generated, Job, Reused, TokenLogprobs
from isthmus.live.gateway.backend import TokenStream
from isthmus.live.gateway.detokenizer import Detokenizer, StopMatcher
from isthmus.live.gateway.tool_use import CallReader
from isthmus.live.gateway.tools.parser import Finding, merged


class Score(msgspec.Struct, frozen=True):
    """Log-probabilities of one output token. `offset`: characters of the answer's text before it."""

    token: int
    logprobs: TokenLogprobs
    offset: int


class Delta(msgspec.Struct):
    """The addition of one batch of tokens to a choice. `finish`: on the last delta only; `found`: the same text split
    into content and calls, None where no call is looked for."""

    text: str
    tokens: list[int]
    scores: list[Score]
    finish: FinishReason | None = None
    prompt_scores: tuple[TokenLogprobs, ...] | None = None
    found: Sequence[Finding] | None = None


class Choice:
    """`index`: within the answer; `stream`: the tokens of `job`; `shows_end`: the token that ends the answer is text
    too; `silent`: only the echoed prompt is wanted, so the first token ends the answer and is dropped; `reader`: of
    tool calls, if there may be some."""

    def __init__(
        self,
        index: int,
        job: Job,
        stream: TokenStream,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        reader: CallReader | None = None,
        *,
        shows_end: bool = False,
        silent: bool = False,
    ) -> None:
        self.index = index
        self.job = job
        self.stream = stream
        self.num_tokens = 0
        self.cached_tokens = 0
        self.reused = Reused(0, 0, 0, len(job.tokens))  # origin of the prompt's KV
        self.finish: FinishReason | None = None
        self._num_chars = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._reader = reader
        self._shows_end, self._silent = shows_end, silent

    def push(self, batch: Sequence[Generated]) -> Delta:
        """Takes the next tokens; those after a stop string are neither shown nor counted.

        Raises ProtocolError when requested log-probabilities are missing.
        """
        delta = Delta("", [], [])
        for generated in batch:
            if generated.cached_tokens is not None:
                self.cached_tokens = generated.cached_tokens
            if generated.index == 0:  # a later attempt finds the answer so far in its cache, too
                self.reused = generated.reused or self._all_exact()
            if generated.index == 0 and self.job.sampling.prompt_logprobs is not None:
                delta.prompt_scores = self._prompt_scores(generated)
            if self._silent:
                self.finish = FinishReason.LENGTH
                break
            self.num_tokens += 1
            delta.tokens.append(generated.token)
            if self.job.sampling.logprobs is not None:
                delta.scores.append(self._score(generated))
            delta.text += self._text(generated)
            self.finish = FinishReason.STOP if self._stops.matched else generated.finish
            if self.finish is not None:
                break
        delta.finish = self.finish
        if self._reader is not None:
            delta.found = self._reader.push(delta.text, last=delta.finish is not None)
        return delta

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the answer; the cluster does not know of it and must be told."""
        return self._stops.matched

    @property
    def ended_with_calls(self) -> bool:
        """Whether the finish reason is `tool_calls`: the model ended the answer itself, after calls."""
        called = self._reader is not None and self._reader.num_calls > 0
        return called and self.finish is FinishReason.STOP and not self.stopped

    def _all_exact(self) -> Reused:
        return Reused(self.cached_tokens, 0, 0, len(self.job.tokens) - self.cached_tokens)

    def _text(self, generated: Generated) -> str:
        # The end token is counted but gives no text.
        ends = generated.finish is FinishReason.STOP and not self._shows_end
        piece = "" if ends else self._detokenizer.push(generated.token)
        if generated.finish is not None:
            piece += self._detokenizer.flush()
        self._num_chars += len(piece)
        shown = self._stops.push(piece)
        return shown + self._stops.flush() if generated.finish is not None else shown

    def _prompt_scores(self, first: Generated) -> tuple[TokenLogprobs, ...]:
        scores = first.prompt_logprobs
        if scores is None or len(scores) != len(self.job.tokens) - 1:
            raise ProtocolError(f"{self.job.request}: the prompt's log-probabilities did not come whole")
        return scores

    def _score(self, generated: Generated) -> Score:
        if generated.logprobs is None:
            raise ProtocolError(f"{self.job.request}: a token came without the log-probabilities asked for")
        return Score(generated.token, generated.logprobs, self._num_chars)


def joined(deltas: Sequence[Delta]) -> Delta:
    """One delta of all deltas of a choice, for an answer that is not streamed."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        scores=[score for delta in deltas for score in delta.scores],
        finish=deltas[-1].finish,
        prompt_scores=next((d.prompt_scores for d in deltas if d.prompt_scores is not None), None),
        found=None if deltas[-1].found is None else merged([each for d in deltas for each in d.found or ()]),
    )
