"""Amounts as a user gives them to an option: numbers, sizes and counts, with commas between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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
