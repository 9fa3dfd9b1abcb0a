"""What a parser finds in an answer, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The call with this index, counted from 0; its arguments come after."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the latest call's arguments, which together are JSON as the model wrote it."""

    index: int
    text: str


Event = Content | CallBegun | Arguments


def put(event: Event, into: list[Event]) -> None:
    """Adds `event`, as one with the last where both are pieces of the same text."""
    last = into[-1] if into else None
    if isinstance(last, Content) and isinstance(event, Content):
        into[-1] = Content(last.text + event.text)
    elif isinstance(last, Arguments) and isinstance(event, Arguments) and last.index == event.index:
        into[-1] = Arguments(last.index, last.text + event.text)
    else:
        into.append(event)
