"""What a request's tools mean for its prompt, its sampling and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from isthmus.errors import ConfigError, RequestError
from isthmus.files.grammar import GrammarLimits
from isthmus.gateway.requests import ChatRequest, TemplateFields
from isthmus.gateway.structured import check_grammar, is_constrained
from isthmus.gateway.template import ChatTemplate
from isthmus.gateway.tokenizer import GatewayTokenizer
from isthmus.gateway.tool_fields import NamedFunction
from isthmus.gateway.tools.events import Content, Event
from isthmus.gateway.tools.formats import FORMATS, Format, recognised
from isthmus.gateway.tools.lark import Asked, UnfollowableError, parameters_alone
from isthmus.gateway.tools.schemas import Schemas

AUTO = "auto"


@dataclass(frozen=True)
class ToolUse:
    """How calls are read from an answer. `form`: a name in FORMATS. `several`: there may be more than one; what comes
    after the first is dropped otherwise, as the client asked. `forced`: the answer must be a call; `strict`: calls must
    follow their schemas."""

    form: str
    schemas: Schemas
    several: bool
    forced: bool
    strict: bool

    @property
    def format(self) -> Format:
        return FORMATS[self.form]

    def reader(self) -> CallReader:
        return CallReader(self)


class CallReader:
    """Reads one answer."""

    def __init__(self, use: ToolUse) -> None:
        self._parser = use.format.parser(use.schemas)
        self._several = use.several

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def push(self, text: str, *, last: bool) -> Sequence[Event]:
        """What `text` settles; `last`: with it the answer ends."""
        events = [*self._parser.push(text), *(self._parser.flush() if last else ())]
        return [event for event in events if self._several or isinstance(event, Content) or event.index == 0]


def call_grammar(request: ChatRequest, use: ToolUse, tokenizer: GatewayTokenizer, limits: GrammarLimits) -> str:
    """Of an answer that must be a call, or in which calls must follow their schemas; "" where none must be and
    there are too many functions for one grammar. May take seconds for large ones.

    Raises RequestError naming the function whose parameters cannot be followed.
    """
    choice = request.tool_choice
    named = choice.name if isinstance(choice, NamedFunction) else None
    schemas = {name: schema for name, schema in use.schemas.items() if named in (None, name)}
    places = {tool.function.name: index for index, tool in enumerate(request.tools or ())}
    for name, schema in schemas.items():
        if schema.get("type", "object") != "object":
            param = f"tools[{places[name]}].function.parameters"
            raise RequestError(f"{param!r} must be the schema of an object", param=param)
    try:
        asked = Asked(use.several and named is None, use.forced, tokenizer.special_token)
        lark = use.format.grammar(schemas, asked)
    except UnfollowableError as error:
        param = f"tools[{places[error.function]}].function.parameters"
        raise RequestError(f"{param!r}: {error}", param=param) from None
    grammar = LLMatcher.grammar_from_lark(lark)
    if len(grammar) > limits.max_bytes:  # before each schema is compiled, which takes long for so many
        if use.forced:
            message = f"'tools' are too many to force a call of: their grammar has {len(grammar)} characters"
            raise RequestError(
                f"{message} of at most {limits.max_bytes}; name one, or send fewer", param="tools"
            )
        return ""
    for name, schema in schemas.items():
        param = f"tools[{places[name]}].function.parameters"
        check_grammar(
            LLMatcher.grammar_from_lark(parameters_alone(schema)), param, tokenizer.for_grammars, limits
        )
    check_grammar(grammar, "tools", tokenizer.for_grammars, limits)
    return grammar


def format_of(template: ChatTemplate | None, name: str) -> Format | None:
    """The format that calls of this model are in: `name`, or with `auto` what its template says; None if that is not
    known. A template without tools has them in words, in Hermes form.

    Raises ConfigError where that is not what `name` says.
    """
    source = template.tool_source if template else None
    if source is None and name not in (AUTO, "hermes"):
        raise ConfigError(
            f"tool_format: {name} is not how this model can be asked: its chat template knows nothing of tools, "
            "so definitions are put in words, and calls are hermes; leave tool_format out"
        )
    return (FORMATS["hermes"] if source is None else recognised(source)) if name == AUTO else FORMATS[name]


def definitions(request: TemplateFields) -> list[dict[str, Any]] | None:
    """For the chat template; None where the model is not to know of any."""
    if not request.tools or (isinstance(request, ChatRequest) and request.tool_choice == "none"):
        return None
    return [tool.for_template() for tool in request.tools]


def tool_use(request: ChatRequest, form: Format | None) -> ToolUse | None:
    """None where no call is looked for. Raises RequestError."""
    choice = request.tool_choice
    names = [tool.function.name for tool in request.tools or ()]
    if not names:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "'tool_choice' asks for a call, and 'tools' names no function", param="tool_choice"
            )
        return None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"'tools' has two functions of the name {twice!r}", param="tools")
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise RequestError(f"'tool_choice' names {choice.name!r}, which 'tools' has not", param="tool_choice")
    forced = choice not in (None, "none", "auto")
    # What else says how the answer must look leaves no room for calls that are not forced.
    if choice == "none" or (not forced and is_constrained(request)):
        return None
    if form is None:
        message = "'tools': how this model writes calls is not known; the server can be told (--tool-format)"
        raise RequestError(message, param="tools")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in request.tools or ()}
    return ToolUse(
        form=form.name,
        schemas=schemas,
        several=request.parallel_tool_calls is not False,
        forced=forced,
        strict=all(tool.function.strict for tool in request.tools or ()),
    )
