"""Answers of /v1/responses, as OpenAI writes them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from isthmus.core.types import FinishReason
from isthmus.live.gateway.choice import Choice, Delta, Score
from isthmus.live.gateway.http import message_of, status_of
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.responses.items import flat_name
from isthmus.live.gateway.tools.parser import Arguments, CallBegun, Content
from isthmus.live.gateway.wire import PromptDetails, TokenBytes, TokenLogprob, Usage, encode, event, scored


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


class InputDetails(PromptDetails, frozen=True):
    """As in other answers' usage."""

    cache_write_tokens: int = 0
    """OpenAI bills these apart from others; here nothing is."""


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


class Transcript:
    """The items of an answer as they grow, and the events that say so. An answer that is not streamed is put together
    here too, so both are the same by construction.

    `hex_id` makes the items' ids unique. `namespaces`: namespace and name of each function that has one, by the name
    that the model knows. `items`: those that are whole."""

    def __init__(self, hex_id: str, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[OutputItem] = []
        self._hex_id, self._namespaces = hex_id, namespaces
        self._numbers = itertools.count()
        self._open: OutputItem | None = None
        self._pieces: list[str] = []  # text or arguments of the open item
        self._logprobs: list[TokenLogprob] = []

    def event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        body = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n".encode() + event(encode(body))

    def say(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """More text of the message; after a call, of a new one."""
        begun = b"" if isinstance(self._open, OutputMessage) else self._begin_message()
        self._pieces.append(text)
        self._logprobs += logprobs
        return begun + self._within("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def call(self, name: str) -> bytes:
        """A call begins."""
        identity = self._next_id("fc")
        namespace, own = self._namespaces.get(name, (UNSET, name))
        call_id = identity.replace("fc_", "call_", 1)
        return self._begin(OutputCall(identity, "in_progress", call_id, own, "", namespace))

    def argue(self, text: str) -> bytes:
        """More of the call's arguments."""
        self._pieces.append(text)
        return self._within("function_call_arguments.delta", delta=text)

    def end(self, status: str) -> bytes:
        """No more comes. What is open then is `status`, and an answer of nothing is an empty message."""
        begun = b"" if self._open or self.items else self._begin_message()
        return begun + self._close(status)

    def _begin_message(self) -> bytes:
        begun = self._begin(OutputMessage(self._next_id("msg"), "in_progress", []))
        return begun + self._within("content_part.added", content_index=0, part=OutputText(""))

    def _begin(self, item: OutputItem) -> bytes:
        closed = self._close("completed")
        self._open, self._pieces, self._logprobs = item, [], []
        return closed + self.event("output_item.added", output_index=len(self.items), item=item)

    def _close(self, status: str) -> bytes:
        item, text = self._open, "".join(self._pieces)
        if item is None:
            return b""
        item.status = status
        if isinstance(item, OutputMessage):
            part = OutputText(text, logprobs=self._logprobs)
            item.content = [part]
            done = self._within("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            done += self._within("content_part.done", content_index=0, part=part)
        else:
            item.arguments = text
            done = self._within("function_call_arguments.done", name=item.name, arguments=text)
        done += self.event("output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = None
        return done

    def _within(self, kind: str, **fields: Any) -> bytes:
        """An event of the open item."""
        assert self._open is not None
        return self.event(kind, output_index=len(self.items), item_id=self._open.id, **fields)

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self._hex_id}_{len(self.items) + (self._open is not None)}"


class ResponsesDialect:
    """A request has one choice."""

    def __init__(self, prepared: PreparedRequest, token_bytes: TokenBytes) -> None:
        self._prepared, self._token_bytes = prepared, token_bytes
        spaces = [tool for tool in prepared.repeated["tools"] if tool["type"] == "namespace"]
        pairs = [(space["name"], tool["name"]) for space in spaces for tool in space["tools"] if "name" in tool]
        self._transcript = Transcript(prepared.id.partition("_")[2], {flat_name(*pair): pair for pair in pairs})
        self._begun = False
        self._finish: FinishReason | None = None
        self._called = False
        self._num_chars = 0  # said before the first call
        self._scores: list[Score] = []  # not shown yet

    def events(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        return self._opening() + self._add(delta)

    def end(self, usage: Usage) -> bytes:
        events = self._transcript.end(self._status)
        return events + self._transcript.event(self._status, response=self._ended(usage))

    def failure(self, error: Exception) -> bytes:
        code = "rate_limit_exceeded" if status_of(error) == 429 else "server_error"
        events = self._transcript.end("incomplete")
        response = self._response("failed")
        response.error = Failure(code, message_of(error))
        return events + self._transcript.event("failed", response=response)

    def reply(self, choices: Sequence[tuple[Choice, Delta]], usage: Usage) -> bytes:
        [(_, whole)] = choices
        self._add(whole)
        self._transcript.end(self._status)
        return encode(self._ended(usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _opening(self) -> bytes:
        """None comes before the first token, so that an error until then has its HTTP status."""
        if self._begun:
            return b""
        self._begun = True
        begun = self._response("in_progress")
        return b"".join([self._transcript.event(kind, response=begun) for kind in ("created", "in_progress")])

    def _add(self, delta: Delta) -> bytes:
        self._finish = delta.finish
        self._scores += delta.scores
        if delta.found is None:
            events = self._say(delta.text) if delta.text else b""
        else:
            events = b""
            for found in delta.found:
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

    def _say(self, text: str) -> bytes:
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
