"""Answers of /v1/responses, as OpenAI writes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec

from isthmus.core.errors import IsthmusError
from isthmus.core.types import FinishReason
from isthmus.live.gateway.choice import Choice, Delta, Score
from isthmus.live.gateway.logprobs import TokenLogprob, scored
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.problems import INTERNAL_MESSAGE, status_of
from isthmus.live.gateway.responses.items import flat_name
from isthmus.live.gateway.responses.reply import (
    Event,
    Failure,
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseEvent,
    ResponsesReply,
    ResponsesUsage,
)
from isthmus.live.gateway.responses.transcript import Transcript
from isthmus.live.gateway.tools.events import Arguments, CallBegun, Content
from isthmus.live.gateway.tools.events import Event as Found
from isthmus.live.gateway.wire import TokenBytes, Usage, encode, event


class ResponsesDialect:
    """A request has one choice."""

    def __init__(self, prepared: PreparedRequest, token_bytes: TokenBytes) -> None:
        self._prepared, self._token_bytes = prepared, token_bytes
        spaces = [tool for tool in prepared.repeated["tools"] if tool["type"] == "namespace"]
        pairs = [(space["name"], tool["name"]) for space in spaces for tool in space["tools"] if "name" in tool]
        self._transcript = Transcript(prepared.id.partition("_")[2], {flat_name(*pair): pair for pair in pairs})
        self._begun = False
        self._numbers = itertools.count()
        self._finish: FinishReason | None = None
        self._reader = prepared.tools.reader() if prepared.tools else None
        self._called = False
        self._num_chars = 0  # said before the first call
        self._scores: list[Score] = []  # not shown yet

    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        return self._written(self._opening() + self._add(delta))

    def end(self, usage: Usage) -> bytes:
        events = self._transcript.end(self._status)
        name = f"response.{self._status}"
        return self._written([*events, ResponseEvent(type=name, response=self._ended(usage))])

    def failure(self, error: Exception) -> bytes:
        code = "rate_limit_exceeded" if status_of(error) == 429 else "server_error"
        message = str(error) if isinstance(error, IsthmusError) else INTERNAL_MESSAGE
        events = self._transcript.end("incomplete")
        response = self._response("failed")
        response.error = Failure(code, message)
        return self._written([*events, ResponseEvent(type="response.failed", response=response)])

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        [(_, whole)] = choices
        self._add(whole)
        self._transcript.end(self._status)
        return encode(self._ended(usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _opening(self) -> list[Event]:
        """None comes before the first token, so that an error until then has its HTTP status."""
        if self._begun:
            return []
        self._begun = True
        begun = self._response("in_progress")
        return [
            ResponseEvent(type="response.created", response=begun),
            ResponseEvent(type="response.in_progress", response=begun),
        ]

    def _add(self, delta: Delta) -> list[Event]:
        self._finish = delta.finish
        self._scores += delta.scores
        events: list[Event] = []
        for found in self._found(delta):
            match found:
                case Content(text):
                    events += self._say(text)
                case CallBegun(_, name):
                    self._called = True
                    events += self._transcript.call(name)
                case Arguments(_, text):
                    events += self._transcript.argue(text)
        if delta.finish is not None and self._scores and not self._called:
            events += self._transcript.say("", self._scored(len(self._scores)))
        return events

    def _found(self, delta: Delta) -> Sequence[Found]:
        if self._reader is not None:
            return self._reader.push(delta.text, last=delta.finish is not None)
        return [Content(delta.text)] if delta.text else []

    def _say(self, text: str) -> list[Event]:
        """With the log-probabilities of the tokens that it begins in. Those of calls have no place in an answer."""
        if self._called:
            return self._transcript.say(text, [])
        self._num_chars += len(text)
        ready = itertools.takewhile(lambda score: score.offset < self._num_chars, self._scores)
        return self._transcript.say(text, self._scored(sum(1 for _ in ready)))

    def _scored(self, count: int) -> list[TokenLogprob]:
        """The first `count` of the scores that have not been shown."""
        ready, self._scores = self._scores[:count], self._scores[count:]
        as_ids = self._prepared.writing.tokens_as_ids
        return [scored(score, self._token_bytes, as_ids=as_ids) for score in ready]

    def _written(self, events: Sequence[Event]) -> bytes:
        for each in events:
            each.sequence_number = next(self._numbers)
        return b"".join(f"event: {each.type}\n".encode() + event(encode(each)) for each in events)

    def _ended(self, usage: Usage) -> ResponsesReply:
        response = self._response(self._status)
        response.usage = _usage(usage)
        if self._finish is FinishReason.LENGTH:
            response.incomplete_details = Incomplete("max_output_tokens")
        else:
            response.completed_at = int(time.time())
        return response

    def _response(self, status: str) -> ResponsesReply:
        prepared, sampling = self._prepared, self._prepared.jobs[0].sampling
        return ResponsesReply(
            id=prepared.id,
            created_at=prepared.created_s,
            model=prepared.model,
            status=status,
            output=self._transcript.items,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            **prepared.repeated,
        )


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(**msgspec.structs.asdict(usage.prompt_tokens_details)),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(),
        total_tokens=usage.total_tokens,
    )
