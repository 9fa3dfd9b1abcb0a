"""A model's chat template: messages to prompt text, in a sandbox, as Hugging Face renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from isthmus.errors import ModelError, RequestError
from isthmus.files import ModelFiles

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """`special_tokens`: name -> text, for the template to use, as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. `add_generation_prompt`: open for the assistant's answer; `continue_final_message`: the text
        ends with the last message's content. Raises RequestError if the template refuses."""
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    **(chat_template_kwargs or {}),
                    "messages": [self._adapted(message) for message in messages],
                    "tools": None,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template runs the model author's code on the client's messages, so it may raise nearly anything.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            message = f"the chat template of this model does not accept these messages: {reason}"
            raise RequestError(message, param="messages") from error
        return _until_content(text, messages[-1]["content"]) if continue_final_message else text

    def _adapted(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """`developer` is OpenAI's newer word for `system`; most templates know only the older one."""
        adapted = dict(message)
        if adapted.get("role") == "developer" and not self._knows_developer:
            adapted["role"] = "system"
        return adapted


def _until_content(text: str, content: str) -> str:
    """Raises RequestError if the template did not write the last message's content as it is."""
    end = text.rfind(content.strip())
    if end < 0 or not content.strip():
        message = "'continue_final_message' needs a last message whose content the chat template writes"
        raise RequestError(message, param="continue_final_message")
    return text[: end + len(content.strip())]


def load_template(files: ModelFiles, config: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of a model, or None. `config`: the content of its tokenizer_config.json.

    Raises ModelError when there is one that cannot be read.
    """
    source = files.text("chat_template.jinja")
    if source is None:
        source = _from_config(config, files.where("tokenizer_config.json"))
    try:
        return None if source is None else ChatTemplate(source, special_tokens(config))
    except (ValueError, jinja2.TemplateSyntaxError) as error:
        raise ModelError(f"{files.path}: the chat template cannot be read: {error}") from error


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name. Each is written as a string or as `{"content": string, ...}`."""
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _from_config(config: Mapping[str, Any], where: str) -> str | None:
    """tokenizer_config.json has one template, or a list of named ones, of which `default` is used."""
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        for entry in template:
            if isinstance(entry, dict) and entry.get("name") == "default":
                source = entry.get("template")
                return source if isinstance(source, str) else None
        return None
    raise ModelError(f"{where}: chat_template must be a string or a list of templates")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like Hugging Face's: jinja2's own escapes HTML, which would put `\\u003c` into prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
