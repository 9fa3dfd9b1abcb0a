"""Whether two machines have the same model, told without reading all of it."""

from __future__ import annotations

from pathlib import Path

import blake3

from isthmus.model_files.header import parts_of

PIECE = 1 << 20
"""Of each file its first and last bytes count, up to so many, and its length. What differs only between them is found
when a node joins: its engine has read all."""
_READ = (".json", ".jinja", ".safetensors", ".gguf", ".model")


def fingerprint(model: Path) -> str:
    """Of a folder or a GGUF file, in hexadecimal. Of a folder all weights count, since vLLM nodes may read more of them
    than others. Raises OSError when there is none, or it cannot be read."""
    digest = blake3.blake3()
    if model.is_file():
        files = parts_of(model)
    else:
        beside = [*model.iterdir(), *model.glob("additional_chat_templates/*")]
        files = sorted(each for each in beside if each.suffix in _READ)
    for file in files:
        with file.open("rb") as opened:
            length = opened.seek(0, 2)
            digest.update(f"{file.name}/{length}/".encode())
            for start in dict.fromkeys((0, max(0, length - PIECE))):
                opened.seek(start)
                digest.update(opened.read(PIECE))
    return digest.hexdigest()
