"""The items of an answer as they grow, and the events that say so.

An answer that is not streamed is put together here too, so both are the same by construction.
"""

from __future__ import annotations

from isthmus.gateway.logprobs import TokenLogprob
from isthmus.gateway.responses.reply import (
    Event,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    TextDelta,
    TextDone,
)


class Transcript:
    """`hex_id` makes the items' ids unique. `items`: those that are whole."""

    def __init__(self, hex_id: str) -> None:
        self.items: list[OutputItem] = []
        self._hex_id = hex_id
        self._open: _Message | None = None

    def say(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        """More text of the message."""
        events = []
        if self._open is None:
            at = len(self.items)
            self._open = _Message(at, f"msg_{self._hex_id}_{at}")
            events = self._open.begin()
        return [*events, self._open.say(text, logprobs)]

    def end(self, status: str) -> list[Event]:
        """No more comes. What is open then is `status`, and an answer of nothing is an empty message."""
        begun = [] if self._open or self.items else self.say("", [])[:-1]
        return begun + self._close(status)

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self.items.append(item)
        self._open = None
        return events


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
