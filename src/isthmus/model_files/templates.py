"""A model's chat templates by name."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.model_files.base import ModelFiles


def chat_templates(files: ModelFiles) -> dict[str, str]:
    """Texts by name, most often only `default`; none where the model has no template.

    As transformers has it: files of their own (chat_template.jinja and additional_chat_templates/NAME.jinja), else what
    tokenizer_config.json says; else chat_template.json, which older processors have. Raises ModelError.
    """
    named = {"default": files.text("chat_template.jinja")}
    for name in files.names("additional_chat_templates", ".jinja"):
        named[PurePath(name).stem] = files.text(name)
    return (
        {name: text for name, text in named.items() if text is not None}
        or _stated(files, "tokenizer_config.json")
        or _stated(files, "chat_template.json")
    )


def _stated(files: ModelFiles, name: str) -> dict[str, str]:
    """Of the field `chat_template`: one template, a list of `{"name": …, "template": …}`, or an object by name."""
    value = files.object(name).get("chat_template")
    named: Any = {} if value is None else value
    if isinstance(value, str):
        named = {"default": value}
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        named = {each.get("name"): each.get("template") for each in value}
    if not isinstance(named, dict) or not all(isinstance(text, str) for each in named.items() for text in each):
        raise ModelError(
            f"{files.where(name)}: chat_template must be a string or a list of templates, each with name and template"
        )
    return named
