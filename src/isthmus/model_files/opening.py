"""Which kind of files a path has."""

from __future__ import annotations

from pathlib import Path

from isthmus.core.errors import ModelError
from isthmus.model_files.base import Folder, ModelFiles
from isthmus.model_files.gguf import GgufFile
from isthmus.model_files.header import parts_of


def open_files(path: Path) -> ModelFiles:
    """The files of a model: of a folder, of a GGUF file, or of the one GGUF file in a folder without safetensors. Parts
    of a split model are one.

    Raises ModelError for a GGUF file that cannot be read, and for a folder with several and nothing else.
    """
    if path.is_file():
        return GgufFile(path)
    found = sorted(path.glob("*.gguf"), reverse=True)
    files = sorted({parts_of(file)[0]: file for file in found}.values())  # of parts the first
    if not files or any(path.glob("*.safetensors")):
        return Folder(path)
    if len(files) > 1:
        raise ModelError(f"{path}: has several GGUF files; name one: {', '.join(file.name for file in files)}")
    return GgufFile(files[0])
