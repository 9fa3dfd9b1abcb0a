"""Options of studies: the annotated fields of a study's `Plan`, so that each is written once.

A field is `Annotated[type, typer.Option(help=...)]`, with a `Text` between them if one text on the command line stands
for several values.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from isthmus.bench.transfer_peers import shown_bytes
from isthmus.config import parse_bytes
from isthmus.core.errors import ConfigError

Number = TypeVar("Number", int, float)


def numbers(option: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: expected numbers with commas between them") from None


def counts(option: str, text: str) -> tuple[int, ...]:
    found = numbers(option, text, int)
    if min(found) < 1:
        raise ConfigError(f"{option} {text}: must be 1 or more")
    return found


def size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def sizes(option: str, text: str) -> tuple[int, ...]:
    found = tuple(size(option, part) for part in text.split(","))
    if 0 in found:
        raise ConfigError(f"{option} {text}: 0 is no size")
    return found


def one_of(known: Iterable[str], option: str, word: str) -> str:
    if word not in known:
        raise ConfigError(f"{option} {word}: known are {', '.join(known)}")
    return word


class Text(NamedTuple):
    """How a value stands on the command line. `parse` is told the option, for its error messages."""

    parse: Callable[[str, str], Any]
    shown: Callable[[Any], str]


def _commas(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


def _words(option: str, text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


COUNTS = Text(counts, _commas)
NUMBERS = Text(partial(numbers, kind=float), lambda values: ",".join(f"{value:g}" for value in values))
SIZE = Text(size, lambda value: shown_bytes(value).replace(" ", ""))
SIZES = Text(sizes, lambda values: ",".join(map(SIZE.shown, values)))
WORDS = Text(_words, _commas)
WORDS_OF_SHELL = Text(lambda option, text: tuple(shlex.split(text)), shlex.join)

Rounds = Annotated[int, typer.Option(min=1, help="Measured turns of each side.")]
ComputeThreads = Annotated[int | None, typer.Option(min=1, help="Threads that compute.")]
