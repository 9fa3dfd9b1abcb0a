"""Which tokens end an answer, as a model's files say."""

from __future__ import annotations

from typing import Any

from isthmus.errors import ModelError
from isthmus.files.base import ModelFiles


def end_tokens(files: ModelFiles) -> tuple[int, ...]:
    """Those of generation_config.json, else of config.json, else the one that tokenizer_config.json names; empty where
    none does.

    Raises ModelError when one of them is not JSON or holds a value of the wrong type.
    """
    for name in ("generation_config.json", "config.json"):
        ids = _stated(files.object(name), files.where(name))
        if ids:
            return ids
    named = files.object("tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    return _named(files.object("tokenizer.json"), text) if isinstance(text, str) else ()


def _stated(config: dict[str, Any], where: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ModelError(f"{where}: eos_token_id must be an integer or a list of integers, found {value!r}")
    return tuple(ids)


def _named(tokenizer: dict[str, Any], text: str) -> tuple[int, ...]:
    """The id of a token by its text."""
    added = tokenizer.get("added_tokens") or ()
    ids = [each["id"] for each in added if each["content"] == text]
    vocab = tokenizer.get("model", {}).get("vocab")
    if not ids and isinstance(vocab, dict) and text in vocab:
        ids = [vocab[text]]
    return tuple(ids[:1])
