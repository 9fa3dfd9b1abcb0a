"""Small traces for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def line(timestamp: Any, input_length: int, output_length: int, hash_ids: Sequence[int], **extra: Any) -> str:
    """One line of a Mooncake trace."""
    fields = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps({**fields, "hash_ids": list(hash_ids), **extra})


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path
