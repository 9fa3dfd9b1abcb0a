"""What every model brings beside its weights, by the names that a Hugging Face folder has for it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from isthmus.core.errors import ModelError


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    """Of a tokenizer.json the ids of its tokens: millions of bytes, so nothing else is made of them."""

    added_tokens: list[_Added] | None = None
    model: _Vocabulary | None = None


class ModelFiles(ABC):
    """Texts by the name of a file: `config.json`, `tokenizer.json`, `tokenizer_config.json`, `generation_config.json`,
    `chat_template.jinja`. `path`: of the folder or the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def text(self, name: str) -> str | None:
        """None when there is no such file. Raises ModelError when it cannot be read."""

    @abstractmethod
    def where(self, name: str) -> str:
        """How messages name it."""

    @abstractmethod
    def missing(self, name: str) -> str:
        """What messages say when it must be there and is not."""

    @abstractmethod
    def names(self, folder: str, suffix: str) -> Sequence[str]:
        """Names of the files in a folder beside these, in order; none where there is no such folder."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """The id of a token by its text, None where the tokenizer has no such token. Raises ModelError."""

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object, empty when there is no such file. Raises ModelError when it is something else."""
        text = self.text(name)
        try:
            value = {} if text is None else json.loads(text)
        except ValueError as error:
            raise ModelError(f"{self.where(name)}: cannot be read as JSON: {error}") from None
        if not isinstance(value, dict):
            raise ModelError(f"{self.where(name)}: expected a JSON object, found {type(value).__name__}")
        return value

    def required(self, name: str) -> str:
        """Raises ModelError also when there is no such file."""
        text = self.text(name)
        if text is None:
            raise ModelError(f"{self.where(name)}: {self.missing(name)}")
        return text

    def required_object(self, name: str) -> dict[str, Any]:
        self.required(name)
        return self.object(name)


class Folder(ModelFiles):
    """As they lie there, with safetensors weights."""

    def text(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8-sig")  # some editors begin files with a BOM
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path / name}: cannot be read: {error}") from None

    def names(self, folder: str, suffix: str) -> Sequence[str]:
        return sorted(f"{folder}/{path.name}" for path in (self.path / folder).glob(f"*{suffix}"))

    def token_id(self, text: str) -> int | None:
        try:
            known = msgspec.json.decode(self.text("tokenizer.json") or "{}", type=_Tokenizer)
        except msgspec.DecodeError as error:
            where = self.where("tokenizer.json")
            raise ModelError(f"{where}: not a tokenizer the tokenizers library can read: {error}") from None
        for added in known.added_tokens or ():
            if added.content == text:
                return added.id
        vocabulary = known.model.vocab if known.model is not None else {}
        if isinstance(vocabulary, dict):
            return vocabulary.get(text)
        return next((at for at, (token, _) in enumerate(vocabulary) if token == text), None)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def missing(self, name: str) -> str:
        return f"no such file; a model folder needs a {name}"
