"""A model's chat template: renders messages to prompt text, in a sandbox, as Hugging Face transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isthmus.core.errors import ModelError, RequestError
from isthmus.live.gateway.contents import (
    NULL_CONTENT,
    Contents,
    MessageContent,
    NullContent,
    in_words,
    with_short_ids,
    with_text,
    with_written_arguments,
)
from isthmus.model_files import ModelFiles, chat_templates, special_tokens

# Marks the end of a continued message; its space shows whether the template strips contents.
_CONTINUE_MARK = "<CONTINUE-HERE> "
_NOT_CONTINUED = (
    "'continue_final_message' needs a last message with content to continue, and without 'tool_calls'"
)


_FALLBACKS = (with_text, with_written_arguments)
"""Changes to messages that are tried in turn when a template refuses them."""
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """`special_tokens`: name (`bos_token`) -> text, for the template; `tool_source`: of the model's separate template
    for conversations with tools, if it has one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _Source(source, special_tokens)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = _Source(tool_source, special_tokens)

    @property
    def tool_source(self) -> str | None:
        """The text of the template that renders tools; None if it does not know them."""
        return self._tool_template.text if self._tool_template.knows_tools else None

    @property
    def shows_users(self) -> bool:
        """Whether prompts show users' messages, in any form."""
        return any(template.contents.shows("user") for template in (self._template, self._tool_template))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, open for the assistant's answer or for more of the last message.

        `messages`: contents are texts or parts, arguments of past calls are objects. `tools`: definitions as clients
        send them; None and an empty list are the same. Raises RequestError if the template refuses.
        """
        context = {
            **_extra(chat_template_kwargs or {}),
            "tools": list(tools) if tools else None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._rendered(messages, tools, context, continue_final_message=continue_final_message)
        except RecursionError:
            message = "these messages and tools hold values nested too deep for the chat template"
            raise RequestError(message, param="messages") from None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        context: Mapping[str, Any],
        *,
        continue_final_message: bool,
    ) -> str:
        if continue_final_message and messages and messages[-1].get("tool_calls"):
            raise RequestError(_NOT_CONTINUED, param="continue_final_message")
        template = self._tool_template if tools or any(map(_is_about_tools, messages)) else self._template
        adapted = [template.adapted(message) for message in messages]
        if not template.knows_tools:
            adapted = in_words(adapted, tools, "system" if template.contents.shows("system") else "user")
        if continue_final_message:
            return _continued(template, adapted, context)
        return template.render(adapted, context)


class _Source:
    """One template. `knows_tools`: it uses the variable `tools`."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = _environment()
        self.text = text
        self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(text))
        self._template = environment.from_string(text)
        self._short_ids = "[TOOL_CALLS]" in text  # Mistral's
        self._special_tokens = dict(special_tokens)
        self.contents = Contents(lambda messages, tools: self._render(messages, {"tools": tools}))

    def render(self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
        """Raises RequestError."""
        tools = bool(context["tools"])
        shaped = [self.contents.shaped(message, tools=tools) for message in messages]
        try:
            return self._render(shaped, context)
        except RequestError:
            for changed in _FALLBACKS:
                others = [changed(message) for message in shaped]
                if any(other is not message for other, message in zip(others, shaped, strict=True)):
                    with suppress(RequestError):
                        return self._render(others, context)
            raise

    def _render(self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]) -> str:
        """Raises RequestError."""
        try:
            return self._template.render({**self._special_tokens, **context, "messages": messages})
        # The model author's code runs on the client's messages, so it may raise nearly anything.
        except _TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split())
            message = f"the chat template of this model does not accept these messages: {reason}"
            raise RequestError(message, param="messages") from error

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template has the role `developer`, and not only that word in its own text."""
        return "developer" in self.text and self.contents.shows("developer")

    def adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with `developer` as `system` for templates that know only the older word, and without null
        fields, since templates test whether a field is there; a null content becomes NULL_CONTENT."""
        adapted = {name: value for name, value in message.items() if value is not None or name == "content"}
        if "content" in adapted and adapted["content"] is None:
            adapted["content"] = NULL_CONTENT
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        return with_short_ids(adapted) if self._short_ids else adapted


def _is_about_tools(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _extra(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises RequestError for an argument that is a field of the request."""
    for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
        if name in given:
            message = f"'chat_template_kwargs' must not have {name!r}: the request has a field of that name"
            raise RequestError(message, param="chat_template_kwargs")
    return given


def _continued(template: _Source, messages: list[dict[str, Any]], context: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content. Raises RequestError if the template hides it."""
    content = messages[-1].get("content")
    if content is None or content == [] or isinstance(content, NullContent):
        raise RequestError(_NOT_CONTINUED, param="continue_final_message")
    marked: MessageContent
    if isinstance(content, str):
        text, marked = content, content + _CONTINUE_MARK
    else:
        *parts, last = content
        text, marked = last["text"], [*parts, last | {"text": last["text"] + _CONTINUE_MARK}]
    rendered = template.render([*messages[:-1], messages[-1] | {"content": marked}], context)
    mark = _CONTINUE_MARK.strip()
    if mark not in rendered or text.strip() not in rendered:
        message = (
            "'continue_final_message': the chat template of this model does not show the last message whole"
        )
        raise RequestError(message, param="continue_final_message")
    before, after = rendered[: rendered.rindex(mark)], rendered[rendered.rindex(mark) :]
    return before if after.startswith(_CONTINUE_MARK) else before.rstrip()


def load_template(files: ModelFiles) -> ChatTemplate | None:
    """A model's templates: `default`, and `tool_use` where there are tools; None if it has none. Without `default`,
    conversations that need it are refused, as in transformers.

    Raises ModelError when one cannot be read.
    """
    named = chat_templates(files)
    if not named:
        return None
    without = f"none of its templates is the default; there are {', '.join(sorted(named))}"
    source = named.get("default", f"{{{{ raise_exception({without!r}) }}}}")
    try:
        return ChatTemplate(source, special_tokens(files), named.get("tool_use"))
    except (ValueError, jinja2.TemplateSyntaxError) as error:
        raise ModelError(f"{files.path}: the chat template cannot be read: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    tests: dict[str, Any] = environment.tests
    tests["none"] = lambda value: value is None or isinstance(value, NullContent)
    for kind in ("string", "iterable", "sequence"):
        tests[kind] = partial(_is_no_null_and, tests[kind])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _is_no_null_and(test: Callable[[Any], bool], value: Any) -> bool:
    return not isinstance(value, NullContent) and test(value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Hugging Face's filter: jinja2's own escapes HTML, which would put `\\u003c` into prompts."""
    return json.dumps(
        _with_null(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _with_null(value: Any) -> Any:
    """Replaces NullContent by None, in a content, a message or a list of messages."""
    if isinstance(value, list):
        return [_with_null(each) if isinstance(each, dict) else each for each in value]
    if isinstance(value, dict) and isinstance(value.get("content"), NullContent):
        return value | {"content": None}
    return None if isinstance(value, NullContent) else value


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
