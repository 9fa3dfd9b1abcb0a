"""Building blocks of the request models: each field says in words what it expects, and as JSON Schema what it takes.

The words are the field's description, and a refused value is answered with them (refusals.py). Every field may
be absent or null, which mean the same. The schema goes into the OpenAPI document (openapi.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_LABEL_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_SEED = 2**63 - 1
MAX_INT = 2**31 - 1
NULL = {"type": "null"}
TOKEN = {"type": "integer", "minimum": 0, "format": "token-id"}
"""Of the formats `token-id`, `num-tokens` and `model-name` the document gives the served model's own bounds."""


@cache
def field_names(kind: type[BaseModel]) -> dict[str, Any]:
    """The fields of a model by the names that JSON has."""
    return {info.alias or name: info for name, info in kind.model_fields.items()}


class Strict(BaseModel):
    """Types as JSON has them: 1.0 is the integer 1, `"1"` is not; no NaN; and no field that is not declared."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        """Stops at the first unknown field. "forbid" lists them all, which takes seconds for a hostile body."""
        if not isinstance(value, dict):
            return value
        known = field_names(cls)
        for name in value:
            if name not in known:
                raise PydanticCustomError("unknown_field", "unknown", {"name": name})
        return {name: whole(each) for name, each in value.items()}


def whole(value: Any) -> Any:
    """The integer that a number without a fraction is; anything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value


@dataclass(frozen=True)
class Checked:
    """A value that `check` reads: what it returns is the field's value. `schema`: what JSON it takes. Where it is
    `nullable`, null is not checked.

    `check` raises `refuse(...)`.
    """

    check: Callable[[Any], Any]
    schema: JsonSchemaValue
    nullable: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: Any) -> Any:
            return None if value is None and self.nullable else self.check(value)

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [self.schema, NULL]} if self.nullable and self.schema != NULL else self.schema


def number(low: float, high: float) -> Any:
    return Field(default=None, ge=low, le=high, description=f"a number from {low:g} to {high:g}")


def integer(low: int, high: int) -> Any:
    return Field(default=None, ge=low, le=high, description=f"an integer from {low} to {high}")


def num_tokens(low: int) -> Any:
    """A number of tokens, which the document bounds by the model's context."""
    words = f"an integer from {low} to {MAX_INT}"
    return Field(
        default=None, ge=low, le=MAX_INT, description=words, json_schema_extra={"format": "num-tokens"}
    )


def _always(words: str, **options: Any) -> Callable[[], Any]:
    return lambda: Field(default=None, description=words, **options)


model_name = _always("the name of a served model, a string", json_schema_extra={"format": "model-name"})
seed = _always("a 64-bit integer", ge=-MAX_SEED - 1, le=MAX_SEED)
boolean = _always("true or false")
label = _always(f"a string of at most {MAX_LABEL_CHARS} characters", max_length=MAX_LABEL_CHARS)
text = _always("a string")
regex = _always("a regular expression, as Rust's regex library reads it", json_schema_extra={"format": "regex"})
free_object = _always("an object")


def refuse(message: str) -> PydanticCustomError:
    """An error whose message is already complete. Braces are for pydantic, so they are passed as context."""
    return PydanticCustomError("refused", "{message}", {"message": message})


def only(*allowed: Any) -> Checked:
    """A field of other servers of which just these values are served; null always is."""
    words = " or ".join(json.dumps(value) for value in allowed)

    def check(value: Any) -> Any:
        if not any(_same(value, each) for each in allowed):
            raise refuse(f"is supported only as {words}")
        return value

    return Checked(check, {"enum": list(allowed)})


def _same(value: Any, allowed: Any) -> bool:
    """1.0 is 1, as in JSON Schema; true is not."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _refuse_any(value: Any) -> Any:
    raise refuse("is not supported by this server: leave it out")


Refused = Checked(_refuse_any, NULL)
Unread = Checked(lambda value: None, {}, nullable=False)
"""What others keep for themselves in a request, and no answer would be another without: anything, which is dropped."""


class Marked(Strict):
    """What clients and other servers write beside anything that is sent again and again: up to where a server is to
    cache, and what was known of it when it was part of an answer (LiteLLM's, Gemini's field)."""

    cache_control: Annotated[Any, Unread] = None
    prompt_cache_breakpoint: Annotated[Any, Unread] = None
    provider_specific_fields: Annotated[Any, Unread] = None
    extra_content: Annotated[Any, Unread] = None


def _parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in stops)
    ):
        raise refuse(f"must be a string or up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stops = Checked(_parse_stops, {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]})


def parse_token_ids(value: Any) -> tuple[int, ...]:
    tokens = tuple(map(whole, value)) if isinstance(value, list) else None
    if tokens is None or not all(type(token) is int and token >= 0 for token in tokens):
        raise refuse("must be a list of token ids (integers of at least 0)")
    return tokens


def _parse_some_token_ids(value: Any) -> tuple[int, ...]:
    if value == []:
        raise refuse("must name at least one token id")
    return parse_token_ids(value)


def parse_count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise refuse("must be an integer of at least 1")
    return value


TokenIds = Checked(parse_token_ids, {"type": "array", "items": TOKEN})
SomeTokenIds = Checked(_parse_some_token_ids, {"type": "array", "items": TOKEN, "minItems": 1})


def texts(least: int, most: int, longest: int) -> Checked:
    """A list of `least` to `most` strings of 1 to `longest` characters."""

    def check(value: Any) -> tuple[str, ...]:
        fine = isinstance(value, list) and least <= len(value) <= most
        if not fine or not all(isinstance(each, str) and 1 <= len(each) <= longest for each in value):
            raise refuse(f"must be a list of {least} to {most} strings, each of 1 to {longest} characters")
        return tuple(value)

    items = {"type": "string", "minLength": 1, "maxLength": longest}
    return Checked(check, {"type": "array", "items": items, "minItems": least, "maxItems": most})


def _parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
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


LogitBias = Checked(
    _parse_logit_bias,
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$", "maxLength": 18, "format": "token-id"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
)
