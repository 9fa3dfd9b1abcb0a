"""The items of an answer as they grow, and the events that say so.

An answer that is not streamed is put together here too, so both are the same by construction.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from isthmus.live.gateway.logprobs import TokenLogprob
from isthmus.live.gateway.responses.reply import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemEvent,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    TextDelta,
    TextDone,
)


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
