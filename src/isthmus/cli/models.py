"""Finds the folder of the model to serve."""

from __future__ import annotations

import re
from pathlib import Path

from isthmus.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def demo_folder() -> Path:
    return Path(__file__).parent.parent / "demo"


def find_model(model: str | None) -> tuple[Path, str]:
    """(folder, name) of a model: None is the bundled demo, else a folder, else a hub id to download.

    Raises ModelError saying what was looked for.
    """
    if model is None:
        return demo_folder(), "isthmus-demo"
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder, folder.resolve().name
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model}: no such folder, and not a hub id (owner/name)")
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
