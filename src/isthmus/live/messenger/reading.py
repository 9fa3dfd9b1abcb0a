"""Values that a peer sends, msgpack of a known type: the one place that knows in how many ways they cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from isthmus.core.errors import ConfigError, ProtocolError

Value = TypeVar("Value")


def read(decode: Callable[[Any], Value], data: bytes | memoryview, what: str) -> Value:
    """Raises ProtocolError for what is no msgpack, or of another type, or makes no sense to that type, or is nested
    deeper than the interpreter goes: what is not asked for is read past, level by level."""
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        raise ProtocolError(f"{what} could not be read: {error}") from None
