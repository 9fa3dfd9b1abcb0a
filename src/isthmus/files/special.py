"""Special tokens by name, as templates know them: `bos_token`, `eos_token` and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.files.base import ModelFiles


def special_tokens(files: ModelFiles) -> dict[str, str]:
    """Texts by name. Older folders say them in special_tokens_map.json: as transformers has it, that file counts where
    tokenizer_config.json lists no `added_tokens_decoder`, and then before it. Raises ModelError."""
    stated = files.object("tokenizer_config.json")
    if "added_tokens_decoder" not in stated:
        stated = stated | files.object("special_tokens_map.json")
    named: Mapping[str, Any] = {name: stated[name] for name in stated if name.endswith("_token")}
    more = stated.get("extra_special_tokens")  # a model's own, as `image_token`
    found = {
        name: _text(value) for name, value in ({**named, **more} if isinstance(more, dict) else named).items()
    }
    return {name: text for name, text in found.items() if text is not None}


def _text(value: Any) -> str | None:
    """Of a token, which is written as a string or as `{"content": string, ...}`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
