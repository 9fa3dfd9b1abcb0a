"""Finds the files of the model to serve."""

from __future__ import annotations

import re
from pathlib import Path

from isthmus.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def demo_folder() -> Path:
    return Path(__file__).parent.parent / "demo"


def find_model(model: str | None) -> tuple[Path, str]:
    """(path, name) of a model: None is the bundled demo, else a folder or a GGUF file, else a hub id to download.

    Raises ModelError saying what was looked for.
    """
    if model is None:
        return demo_folder(), "isthmus-demo"
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.is_file():
        return path, path.stem
    if not _HUB_ID.fullmatch(model) or path.suffix == ".gguf":
        raise ModelError(f"{model}: no such folder or file, and not a hub id (owner/name)")
    return _download(model), model


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED))
    except RepositoryNotFoundError:
        raise ModelError(f"{model}: the hub has no such model, or it needs a login") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{model}: no such folder, and the hub cannot be reached: {reason}") from None
