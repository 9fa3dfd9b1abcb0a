"""A model's files: a Hugging Face folder, or one GGUF file, which is read as the folder it would be."""

from isthmus.model_files.base import (
    Folder,
    ModelFiles,
    added_tokens,
    chat_templates,
    end_tokens,
    fingerprint,
    read_ends,
    special_tokens,
    weight_files,
)
from isthmus.model_files.gguf import GgufFile
from isthmus.model_files.opening import open_files

__all__ = [
    "Folder",
    "GgufFile",
    "ModelFiles",
    "added_tokens",
    "chat_templates",
    "end_tokens",
    "fingerprint",
    "open_files",
    "read_ends",
    "special_tokens",
    "weight_files",
]
