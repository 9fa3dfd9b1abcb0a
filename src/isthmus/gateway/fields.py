"""Building blocks of the request models: each field says in words what it expects.

The words are the field's description, and a refused value is answered with them (refusals.py). Every field may
be absent or null, which mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_LABEL_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_SEED = 2**63 - 1


class Strict(BaseModel):
    """Types as JSON has them: no `"1"` for 1, no NaN; and no field that is not declared."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """Stops at the first unknown field. "forbid" lists them all, which takes seconds for a hostile body."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError("unknown_field", "unknown", {"name": name})
        return value


def number(low: float, high: float) -> Any:
    return Field(default=None, ge=low, le=high, description=f"a number from {low:g} to {high:g}")


def integer(low: int, high: int) -> Any:
    return Field(default=None, ge=low, le=high, description=f"an integer from {low} to {high}")


def seed() -> Any:
    return Field(default=None, ge=-MAX_SEED - 1, le=MAX_SEED, description="a 64-bit integer")


def boolean() -> Any:
    return Field(default=None, description="true or false")


def label() -> Any:
    words = f"a string of at most {MAX_LABEL_CHARS} characters"
    return Field(default=None, max_length=MAX_LABEL_CHARS, description=words)


def refuse(message: str) -> PydanticCustomError:
    """An error whose message is already complete. Braces are for pydantic, so they are passed as context."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def only(*allowed: Any) -> BeforeValidator:
    """A field of OpenAI's of which just these values are served; None always is."""
    words = " or ".join(json.dumps(value) for value in allowed)

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise refuse(f"is supported only as {words}")
        return value

    return BeforeValidator(check)


def _refuse_any(value: Any) -> Any:
    if value is not None:
        raise refuse("is not supported by this server: leave it out")
    return value


Refused = BeforeValidator(_refuse_any)


def checked(check: Callable[[Any], Any]) -> AfterValidator:
    """Runs `check` on values that are not null."""
    return AfterValidator(lambda value: None if value is None else check(value))


def parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise refuse(f"must be a string or up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def parse_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise refuse("must be a list of token ids (integers of at least 0)")
    return tuple(value)


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    words = "must be an object of token ids (as strings) to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise refuse(words)
    bias = {}
    for key, amount in value.items():
        # isascii: "²".isdigit() is true too. The length keeps int() away from absurdly long numbers.
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise refuse(f"{words}; {key[:40]!r} is not a token id")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not -100 <= amount <= 100:
            raise refuse(f"{words}; that of {key!r} is {amount!r}"[:200])
        bias[int(key)] = float(amount)  # by number: "5" and "05" are one token
    return tuple(bias.items())
