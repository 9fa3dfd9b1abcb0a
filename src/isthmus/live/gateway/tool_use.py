"""The effect of a request's tools on its prompt, its grammar and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from isthmus import sandbox
from isthmus.core.errors import ConfigError, RequestError
from isthmus.live.gateway.messages import AllowedFunctions, NamedFunction, functions
from isthmus.live.gateway.requests import ChatRequest, TemplateFields
from isthmus.live.gateway.schemas.reading import SchemaError
from isthmus.live.gateway.structured import check_grammar, is_constrained, matcher_type, unfollowed
from isthmus.live.gateway.template import ChatTemplate
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from isthmus.live.gateway.tools import FORMATS, Format, recognised
from isthmus.live.gateway.tools.lark import ANY_ARGUMENTS, AnswerForm, Schemas
from isthmus.live.gateway.tools.parser import Content, Finding
from isthmus.model_files.grammar_limits import GrammarLimits

AUTO = "auto"


@dataclass(frozen=True)
class ToolUse:
    """How calls are read from an answer. `form`: a key of FORMATS; `several`: more than one call is kept; `forced`:
    the answer must be a call; `strict`: calls must follow their schemas; `constrained`: an answer without a call
    follows a grammar of its own."""

    form: str
    schemas: Schemas
    several: bool
    forced: bool
    strict: bool
    constrained: bool = False

    @property
    def format(self) -> Format:
        return FORMATS[self.form]


class CallReader:
    """Reads the calls of one answer. A constrained answer is a call only if it begins as one, since JSON may contain
    what looks like a call."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._parser = use.format(use.schemas)
        self._undecided = "" if use.constrained else None
        self._is_content = False

    @property
    def num_calls(self) -> int:
        return 0 if self._is_content else self._parser.num_calls

    def push(self, text: str, *, last: bool) -> Sequence[Finding]:
        """The findings that `text` settles; `last`: the answer ends with it."""
        events = [] if self._is_content else [*self._parser.push(text), *(self._parser.flush() if last else ())]
        if self._undecided is not None:
            text = self._undecided = self._undecided + text
            self._is_content = not self._may_be_call(text) or bool(events and isinstance(events[0], Content))
            if events or self._is_content:
                self._undecided = None
        if self._is_content:
            return [Content(text)] if text else []
        if self._use.several:
            return events
        return [event for event in events if isinstance(event, Content) or event.index == 0]

    def _may_be_call(self, text: str) -> bool:
        openings, text = self._use.format.openings, "".join(text.split())
        return any(text.startswith(opening) or opening.startswith(text) for opening in openings)


def call_grammar(
    request: ChatRequest, use: ToolUse, answer: str, tokenizer: GatewayTokenizer, limits: GrammarLimits
) -> str:
    """The grammar of an answer that must be a call, or whose calls must follow their schemas. `answer`: the grammar
    of the alternative to a call, "" where that is free text. Returns "" for more functions than one grammar holds,
    unless forced. May take seconds.

    Raises RequestError naming the function whose parameters cannot be followed.
    """
    named = request.tool_choice.name if isinstance(request.tool_choice, NamedFunction) else None
    otherwise = "" if use.forced else answer
    alone = AnswerForm(several=False, forced=True, token_of=tokenizer.special_token)
    chosen = [
        (f"tools[{at}].function.parameters", tool.function, use.strict or use.forced or tool.function.strict)
        for at, tool in enumerate(request.tools or ())
        if named in (None, tool.function.name)
    ]

    def written(schemas: Schemas, asked: AnswerForm = alone) -> str:
        return matcher_type("tools").grammar_from_lark(use.format.grammar(schemas, asked))

    schemas, ones = {}, {}
    for param, function, must in chosen:
        schema = use.schemas[function.name]
        if schema.get("type") not in (None, "object", ["object"]):
            raise RequestError(f"{param!r} must be the schema of an object", param=param)
        sandbox.note(param)
        try:
            ones[param] = written({function.name: schema})
        except SchemaError as error:
            if must:
                raise unfollowed(param, error) from None
            schema = ANY_ARGUMENTS
        schemas[function.name] = schema
    asked = replace(
        alone,
        several=use.several and named is None,
        forced=use.forced or bool(otherwise),
        otherwise=_ANSWER if otherwise else "",
    )
    grammar = written(schemas, asked)
    if len(grammar) > limits.max_bytes:  # checked before compiling each schema, which is slow
        if use.forced:
            message = f"'tools' are too many to force a call of: their grammar has {len(grammar)} characters"
            message += f" of at most {limits.max_bytes}; name one, or send fewer"
            raise RequestError(message, param="tools")
        if not otherwise:
            return ""
        schemas, ones = dict.fromkeys(schemas, ANY_ARGUMENTS), {}
    for param, function, must in chosen:
        try:
            if param in ones:
                check_grammar(ones[param], param, tokenizer.for_grammars, limits)
        except RequestError:
            if must:
                raise
            schemas[function.name] = ANY_ARGUMENTS
    grammar = written(schemas, asked)
    if otherwise:
        grammar += f"\n{_ANSWER}: %lark {{\n{otherwise}\n}}"
    check_grammar(grammar, "tools", tokenizer.for_grammars, limits)
    return grammar


_ANSWER = "answer"
"""Rule of an answer without a call; no other rule has this name."""


def format_of(template: ChatTemplate | None, name: str) -> Format | None:
    """The tool format `name`, or for `auto` that of the chat template; None if unknown. A template that does not know
    tools gets them in words, in Hermes form.

    Raises ConfigError where the template contradicts `name`.
    """
    source = template.tool_source if template else None
    if source is None and name not in (AUTO, "hermes"):
        raise ConfigError(
            f"tool_format: {name} is not how this model can be asked: its chat template knows nothing of tools, "
            "so definitions are put in words, and calls are hermes; leave tool_format out"
        )
    return (FORMATS["hermes"] if source is None else recognised(source)) if name == AUTO else FORMATS[name]


def definitions(request: TemplateFields) -> list[dict[str, Any]] | None:
    """Tool definitions for the chat template; None where the model must not see any."""
    if not request.tools or (isinstance(request, ChatRequest) and request.tool_choice == "none"):
        return None
    return [tool.for_template() for tool in request.tools]


def tool_use(request: ChatRequest, form: Format | None) -> ToolUse | None:
    """None where no call is looked for. Raises RequestError."""
    choice = request.tool_choice
    names = [tool.function.name for tool in functions(request.tools_) or ()]
    asked = {choice.name} if isinstance(choice, NamedFunction) else set[str]()
    if isinstance(choice, AllowedFunctions):
        asked, choice = set(choice.names), choice.mode
    if not names:
        if asked or choice == "required":
            message = "'tool_choice' asks for a call, and 'tools' names no function"
            raise RequestError(message, param="tool_choice")
        return None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"'tools' has two functions of the name {twice!r}", param="tools")
    if missing := asked.difference(names):
        raise RequestError(f"'tool_choice' names {min(missing)!r}, which 'tools' has not", param="tool_choice")
    forced = choice not in (None, "none", "auto")
    if choice == "none":
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
        constrained=not forced and is_constrained(request),
    )
