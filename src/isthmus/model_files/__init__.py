"""A model's files: a Hugging Face folder, or one GGUF file, which is read as the folder it would be."""

from isthmus.model_files.base import Folder, ModelFiles
from isthmus.model_files.ends import end_tokens, read_ends
from isthmus.model_files.fingerprint import fingerprint
from isthmus.model_files.gguf import GgufFile
from isthmus.model_files.opening import open_files
from isthmus.model_files.special import added_tokens, special_tokens
from isthmus.model_files.templates import chat_templates
from isthmus.model_files.weights import weight_files

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
