"""What every model brings beside its weights, by the names that a Hugging Face folder has for it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from isthmus.errors import ModelError


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
            return (self.path / name).read_text(encoding="utf8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path / name}: cannot be read: {error}") from None

    def where(self, name: str) -> str:
        return str(self.path / name)

    def missing(self, name: str) -> str:
        return f"no such file; a model folder needs a {name}"
