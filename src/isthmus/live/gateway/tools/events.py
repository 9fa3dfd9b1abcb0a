"""What a parser finds in an answer, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


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


def joined(events: Sequence[Event]) -> list[Event]:
    """The same with neighbours that are pieces of the same text as one."""
    return [_one(list(pieces)) for _, pieces in groupby(events, _text_of)]


def _text_of(event: Event) -> tuple[type, int]:
    return type(event), 0 if isinstance(event, Content) else event.index


def _one(pieces: list[Event]) -> Event:
    match pieces:
        case [Content(), _, *_]:
            return Content("".join(each.text for each in pieces if isinstance(each, Content)))
        case [Arguments(index), _, *_]:
            return Arguments(index, "".join(each.text for each in pieces if isinstance(each, Arguments)))
    [only] = pieces
    return only
