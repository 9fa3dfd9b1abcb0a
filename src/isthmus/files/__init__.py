"""A model's files: a Hugging Face folder, or one GGUF file, which is read as the folder it would be."""

from isthmus.files.base import Folder, ModelFiles
from isthmus.files.ends import end_tokens
from isthmus.files.fingerprint import fingerprint
from isthmus.files.gguf import GgufFile
from isthmus.files.opening import open_files

__all__ = ["Folder", "GgufFile", "ModelFiles", "end_tokens", "fingerprint", "open_files"]
