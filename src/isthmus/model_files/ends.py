"""Which tokens end an answer, as a model's files say."""

from __future__ import annotations

from typing import Any, NamedTuple

from isthmus.core.errors import ModelError
from isthmus.model_files.base import ModelFiles
from isthmus.model_files.special import special_tokens


class Ends(NamedTuple):
    """`tokens`: ids, each once. `ignored`: what the files say and no answer can end with, a line each."""

    tokens: tuple[int, ...]
    ignored: tuple[str, ...]


def end_tokens(files: ModelFiles) -> tuple[int, ...]:
    """Ids of the tokens that end an answer; empty where the files name none. Raises ModelError as `read_ends`."""
    return read_ends(files).tokens


def read_ends(files: ModelFiles) -> Ends:
    """The ids of generation_config.json, else of config.json, as transformers generates; and the tokenizer's end token,
    with which turns end where the author of a fine-tuned model changed the tokenizer alone.

    Raises ModelError when a file is not JSON or holds a value of the wrong type.
    """
    config = files.object("config.json")
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else {}
    stated = (
        _stated(files.object("generation_config.json"), files.where("generation_config.json"))
        or _stated(config, files.where("config.json"))
        or _stated(text_config, files.where("config.json"))
    )
    ignored = []
    if (text := special_tokens(files).get("eos_token")) is not None:
        token = files.token_id(text)
        if token is None:
            where = files.where("tokenizer_config.json")
            ignored.append(f"{where}: the end token {text!r} is ignored: the tokenizer has no such token")
        else:
            stated = (*stated, token)
    size = config.get("vocab_size", text_config.get("vocab_size"))
    beyond = [token for token in stated if type(size) is int and token >= size]
    if beyond:
        names = ", ".join(map(str, dict.fromkeys(beyond)))
        ignored.append(f"{files.path}: the end token {names} is ignored: the model has {size} tokens")
    return Ends(tuple(dict.fromkeys(token for token in stated if token not in beyond)), tuple(ignored))


def _stated(config: dict[str, Any], where: str) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelError(
            f"{where}: eos_token_id must be an integer of at least 0 or a list of such, found {value!r}"
        )
    return tuple(ids)
