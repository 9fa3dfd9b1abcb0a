"""Special tokens: by name, as templates know them (`bos_token`, `eos_token` and others), and all of them."""

from __future__ import annotations

from typing import Any

from isthmus.model_files.base import Folder, ModelFiles


def special_tokens(files: ModelFiles) -> dict[str, str]:
    """Texts by name. Raises ModelError."""
    return _named(_stated(files))


def added_tokens(files: ModelFiles) -> dict[str, bool]:
    """Texts that are found whole in prompts, and whether they are special (not shown), as the files beside a folder's
    tokenizer say; of a GGUF file its tokenizer knows all. Raises ModelError."""
    stated = _stated(files) if isinstance(files, Folder) else {}
    decoder = stated.get("added_tokens_decoder")
    entries = [each for each in decoder.values() if isinstance(each, dict)] if isinstance(decoder, dict) else []
    found = {text: each.get("special") is True for each in entries if (text := _text(each)) is not None}
    lists = [stated.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
    listed = [_text(each) for values in lists if isinstance(values, list) for each in values]
    named = [*listed, *_named(stated).values()]
    return found | {text: True for text in named if text is not None}


def _named(stated: dict[str, Any]) -> dict[str, str]:
    named = {name: value for name, value in stated.items() if name.endswith("_token")}
    more = stated.get("extra_special_tokens")  # a model's own, as `image_token`
    named |= more if isinstance(more, dict) else {}
    return {name: text for name, value in named.items() if (text := _text(value)) is not None}


def _stated(files: ModelFiles) -> dict[str, Any]:
    """Older folders say special tokens in special_tokens_map.json: as transformers has it, that file counts where
    tokenizer_config.json lists no `added_tokens_decoder`, and then before it."""
    config = files.object("tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | files.object("special_tokens_map.json")


def _text(value: Any) -> str | None:
    """Of a token, which is written as a string or as `{"content": string, ...}`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
