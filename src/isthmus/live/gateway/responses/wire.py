"""Answers of /v1/responses, as OpenAI writes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.errors import IsthmusError
from isthmus.core.types import FinishReason
from isthmus.live.gateway.choice import Choice, Delta, Score
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.problems import INTERNAL_MESSAGE, status_of
from isthmus.live.gateway.responses.items import flat_name
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content
from isthmus.live.gateway.tools.parser import Event as Found
from isthmus.live.gateway.wire import TokenBytes, TokenLogprob, Usage, encode, event, scored


class OutputText(msgspec.Struct):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []
    type: str = "output_text"


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """`call_id`: what its result is sent back with. `arguments`: JSON as the model wrote it. `namespace`: of functions
    that have one."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputCall


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """OpenAI bills these apart from others; here nothing is."""
    # As in other answers' usage, and like these only where more than the same prefix may be reused.
    exact_tokens: int | UnsetType = UNSET
    moved_tokens: int | UnsetType = UNSET
    similar_tokens: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    """Reasoning is part of the text."""


class ResponsesUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct, frozen=True):
    reason: str


class Failure(msgspec.Struct, frozen=True):
    code: str
    message: str


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None = None


class ResponsesReply(msgspec.Struct):
    """Most fields repeat what was asked for."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    completed_at: int | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponsesUsage | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False


class Event(msgspec.Struct, kw_only=True):
    """One of a streamed answer. `sequence_number`: set when it is written."""

    type: str
    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    response: ResponsesReply


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: OutputItem


class PartEvent(Event, kw_only=True):
    output_index: int
    item_id: str
    part: OutputText
    content_index: int = 0


class TextDelta(Event, kw_only=True):
    output_index: int
    item_id: str
    delta: str
    logprobs: list[TokenLogprob]
    content_index: int = 0
    type: str = "response.output_text.delta"


class TextDone(Event, kw_only=True):
    output_index: int
    item_id: str
    text: str
    logprobs: list[TokenLogprob]
    content_index: int = 0
    type: str = "response.output_text.done"


class ArgumentsDelta(Event, kw_only=True):
    output_index: int
    item_id: str
    delta: str
    type: str = "response.function_call_arguments.delta"


class ArgumentsDone(Event, kw_only=True):
    output_index: int
    item_id: str
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"


class Transcript:
    """`hex_id` makes the items' ids unique. `namespaces`: namespace and name of each function that has one, by the name
    that the model knows. `items`: those that are whole."""

    def __init__(self, hex_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[OutputItem] = []
        self._hex_id, self._namespaces = hex_id, namespaces
        self._open: _Message | _Call | None = None

    def say(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        """More text of the message; after a call, of a new one."""
        events = []
        if not isinstance(self._open, _Message):
            events = self._next(_Message(*self._place("msg")))
        assert isinstance(self._open, _Message)
        return [*events, self._open.say(text, logprobs)]

    def call(self, name: str) -> list[Event]:
        """A call begins."""
        return self._next(_Call(*self._place("fc"), *self._namespaces.get(name, (UNSET, name))))

    def argue(self, text: str) -> list[Event]:
        """More of the call's arguments."""
        assert isinstance(self._open, _Call)
        return [self._open.argue(text)]

    def end(self, status: str) -> list[Event]:
        """No more comes. What is open then is `status`, and an answer of nothing is an empty message."""
        begun = [] if self._open or self.items else self._next(_Message(*self._place("msg")))
        return begun + self._close(status)

    def _next(self, item: _Message | _Call) -> list[Event]:
        events = self._close("completed")
        self._open = item
        return events + item.begin()

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self.items.append(item)
        self._open = None
        return events

    def _place(self, prefix: str) -> tuple[int, str]:
        """Index and id of the next item."""
        at = len(self.items) + (self._open is not None)
        return at, f"{prefix}_{self._hex_id}_{at}"


class _Message:
    def __init__(self, output_index: int, item_id: str) -> None:
        self._at, self._id = output_index, item_id
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        item = OutputMessage(self._id, "in_progress", [])
        return [
            ItemEvent(type="response.output_item.added", output_index=self._at, item=item),
            self._part("added", OutputText("")),
        ]

    def say(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        self._text.append(text)
        self._logprobs += logprobs
        return TextDelta(output_index=self._at, item_id=self._id, delta=text, logprobs=logprobs)

    def end(self, status: str) -> tuple[OutputItem, list[Event]]:
        text, logprobs = "".join(self._text), self._logprobs
        part = OutputText(text, logprobs=logprobs)
        item = OutputMessage(self._id, status, [part])
        return item, [
            TextDone(output_index=self._at, item_id=self._id, text=text, logprobs=logprobs),
            self._part("done", part),
            ItemEvent(type="response.output_item.done", output_index=self._at, item=item),
        ]

    def _part(self, what: str, part: OutputText) -> Event:
        kind = f"response.content_part.{what}"
        return PartEvent(type=kind, output_index=self._at, item_id=self._id, part=part)


class _Call:
    def __init__(self, output_index: int, item_id: str, namespace: str | UnsetType, name: str) -> None:
        self._at, self._id, self._name, self._namespace = output_index, item_id, name, namespace
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        return [self._item("added", self._called("in_progress"))]

    def argue(self, text: str) -> Event:
        self._arguments.append(text)
        return ArgumentsDelta(output_index=self._at, item_id=self._id, delta=text)

    def end(self, status: str) -> tuple[OutputItem, list[Event]]:
        item = self._called(status)
        done = ArgumentsDone(output_index=self._at, item_id=self._id, name=self._name, arguments=item.arguments)
        return item, [done, self._item("done", item)]

    def _called(self, status: str) -> OutputCall:
        call_id = self._id.replace("fc_", "call_", 1)
        return OutputCall(self._id, status, call_id, self._name, "".join(self._arguments), self._namespace)

    def _item(self, what: str, item: OutputCall) -> Event:
        return ItemEvent(type=f"response.output_item.{what}", output_index=self._at, item=item)


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
