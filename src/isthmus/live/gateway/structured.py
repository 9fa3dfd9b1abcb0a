"""Structured output: turns the fields that constrain an answer into one grammar, in llguidance's Lark, which engines
follow token by token (`Sampling.grammar`). White space between JSON's parts is allowed up to a length: a small model
would write nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from isthmus import sandbox
from isthmus.core.errors import RequestError
from isthmus.extras import missing
from isthmus.live.gateway import fields
from isthmus.live.gateway.fields import Checked, Refused, Strict, only, refuse
from isthmus.live.gateway.schemas.grammar import FREE, Spacing, lark_as_read, schema_lark
from isthmus.live.gateway.schemas.reading import SchemaError
from isthmus.model_files.grammar_limits import GrammarError, GrammarLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from isthmus.live.gateway.requests import GenerationRequest

MAX_CHOICES = 1024
MAX_CHECKED = 128
"""Grammars remembered as correct: clients repeat them."""


def _parse_schema(value: Any) -> Any:
    """A JSON schema, or a text that holds one."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=Decimal)
        except (ValueError, ArithmeticError, RecursionError):
            raise refuse("must be a JSON schema: the text is not JSON") from None
    if not isinstance(value, dict | bool):
        raise refuse("must be a JSON schema: an object, or its text")
    return value


SchemaField = Checked(
    _parse_schema, {"type": ["object", "boolean"], "not": {"const": False}}
)  # nothing fits false


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: str | None = fields.label()
    description: str | None = fields.text()
    strict: bool | None = fields.boolean()
    """No effect: answers always follow the schema."""
    schema_: Annotated[Any, SchemaField] = Field(default=None, alias="schema")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's field: one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json_: Annotated[Any, SchemaField] = Field(default=None, alias="json")
    json_object: bool | None = fields.boolean()
    regex: str | None = fields.regex()
    choice: Annotated[Any, fields.texts(1, MAX_CHOICES, fields.MAX_STOP_CHARS)] = None
    grammar: str | None = fields.text()
    disable_any_whitespace: bool | None = fields.boolean()
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Annotated[Any, Refused] = None
    structural_tag: Annotated[Any, Refused] = None


def grammar_of(request: GenerationRequest) -> tuple[str, str]:
    """The grammar that a request asks for, and the name of the field; ("", "") if none does. Raises RequestError if
    several do."""
    given = [
        *_from_response_format(request),
        *_from_structured_outputs(request),
        *_read(request, _GRAMMAR_FIELDS),
    ]
    if len(given) > 1:
        one, other = given[0][1], given[1][1]
        raise RequestError(f"{one!r} and {other!r} each say how the answer must look: give one", param=other)
    return given[0] if given else ("", "")


def is_constrained(request: GenerationRequest) -> bool:
    """Whether some field constrains the answer."""
    form = request.response_format
    formed = form is not None and not isinstance(form, TextFormat)
    return formed or any(
        getattr(request, name) is not None for name in ("structured_outputs", *_GRAMMAR_FIELDS)
    )


@lru_cache(MAX_CHECKED)
def check_grammar(grammar: str, param: str, tokenizer: LLTokenizer, limits: GrammarLimits) -> None:
    """Raises RequestError for a grammar that llguidance cannot follow. May take a second for a large one."""
    from isthmus.model_files.grammar import compile_grammar

    sandbox.note(param)
    try:
        compile_grammar(grammar, tokenizer, limits)
    except GrammarError as error:
        raise unfollowed(param, error) from None


def matcher_type(param: str) -> type[LLMatcher]:
    """llguidance's matcher; the library need not be installed where no answer is computed. Raises RequestError."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise RequestError(str(missing(error, f"to follow {param!r} the server")), param=param) from None
    return LLMatcher


def unfollowed(param: str, error: Exception) -> RequestError:
    """The refusal of a field whose schema or grammar cannot be followed."""
    return RequestError(f"{param!r} cannot be followed: {error}", param=param)


Given = list[tuple[str, str]]
"""Grammars, each with the name of its field."""


def _from_response_format(request: GenerationRequest) -> Given:
    form, param = request.response_format, "response_format"
    if isinstance(form, JsonObjectFormat):
        return [(_json({"type": "object"}, param), param)]
    if isinstance(form, JsonSchemaFormat):
        schema, param = form.json_schema.schema_, f"{param}.json_schema.schema"
        return [(_json({} if schema is None else schema, param), param)]
    return []


def _from_structured_outputs(request: GenerationRequest) -> Given:
    asked, param = request.structured_outputs, "structured_outputs"
    if asked is None:
        return []
    spaces = not asked.disable_any_whitespace
    schemas = {"json": asked.json_, "json_object": {"type": "object"} if asked.json_object else None}
    names = {name: f"{param}.{name}" for name in schemas}
    given = [
        (_json(schema, names[name], spaces=spaces), names[name])
        for name, schema in schemas.items()
        if schema is not None
    ]
    given += _read(asked, {"regex": _regex, "choice": _choice, "grammar": _lark}, f"{param}.")
    if not given:
        message = f"{param!r} says nothing: give one of json, json_object, regex, choice, grammar"
        raise RequestError(message, param=param)
    return given


def _read(owner: Any, readers: Mapping[str, Callable[[Any, str], str]], prefix: str = "") -> Given:
    """The grammars of the fields that have a value."""
    return [
        (read(value, prefix + name), prefix + name)
        for name, read in readers.items()
        if (value := getattr(owner, name)) is not None
    ]


def _json(schema: Any, param: str, *, spaces: bool = True) -> str:
    sandbox.note(param)
    try:
        return matcher_type(param).grammar_from_lark(schema_lark(schema, FREE if spaces else Spacing()))
    except SchemaError as error:
        raise unfollowed(param, error) from None


def _regex(regex: str, param: str) -> str:
    """The Lark within the library's form: vLLM takes no other."""
    lark: str = json.loads(matcher_type(param).grammar_from_regex(regex))["grammars"][0]["lark_grammar"]
    return lark


def _choice(choices: tuple[str, ...], param: str) -> str:
    """One of these texts, as one terminal: llguidance's parser would refuse so many rules. JSON's string escapes are
    also Lark's, which requires some."""
    lark = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}"
    return matcher_type(param).grammar_from_lark(lark)


def _lark(grammar: str, param: str) -> str:
    """Lark as it is; GBNF (`root ::= ...`), which vLLM and SGLang accept too, translated."""
    sandbox.note(param)
    if grammar.lstrip().startswith("{"):  # llguidance's own form, whose schemas would not be read here
        raise RequestError(f"{param!r} must be Lark or GBNF, not JSON", param=param)
    if "::=" not in grammar:
        try:
            return matcher_type(param).grammar_from_lark(lark_as_read(grammar))
        except SchemaError as error:
            raise unfollowed(param, error) from None
    matcher = matcher_type(param)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return matcher.grammar_from_lark(gbnf_to_lark(grammar))
    except Exception as error:  # the library raises bare exceptions of several types
        reason = " ".join(str(error).split())[:200]
        raise RequestError(f"{param!r} cannot be read as GBNF: {reason}", param=param) from None


_GRAMMAR_FIELDS: dict[str, Callable[[Any, str], str]] = {
    "guided_json": _json,
    "json_schema": _json,
    "guided_regex": _regex,
    "regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
    "ebnf": _lark,
}
"""Fields of a request that hold nothing but a grammar, with their readers."""
