"""Whether two machines have the same model, told without reading all of it."""

from __future__ import annotations

from pathlib import Path

import blake3

PIECE = 1 << 20
"""Of each file its first and last bytes count, up to so many, and its length. What differs only between them is found
when a node joins: its engine has read all."""
_READ = (".json", ".jinja", ".safetensors", ".gguf", ".model")


def fingerprint(model: Path) -> str:
    """Of a folder or a GGUF file, in hexadecimal. Raises OSError when there is none, or it cannot be read."""
    digest = blake3.blake3()
    files = [model] if model.is_file() else sorted(each for each in model.iterdir() if each.suffix in _READ)
    for file in files:
        with file.open("rb") as opened:
            length = opened.seek(0, 2)
            digest.update(f"{file.name}/{length}/".encode())
            for start in dict.fromkeys((0, max(0, length - PIECE))):
                opened.seek(start)
                digest.update(opened.read(PIECE))
    return digest.hexdigest()
