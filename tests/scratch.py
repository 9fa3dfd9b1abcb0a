"""A copy of the tree, in which things are tried while work goes on in the tree itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent


def copied(scratch: Path) -> Path:
    left_out = shutil.ignore_patterns(
        ".venv*", ".git", ".*_cache", ".hypothesis", ".steady", "build", "__pycache__"
    )
    shutil.copytree(ROOT, scratch, ignore=left_out, dirs_exist_ok=True)
    return scratch


def environment(scratch: Path, **others: str) -> dict[str, str]:
    """In which the copy's own package is found, by the processes that tests start, too."""
    return {**os.environ, "PYTHONPATH": str(scratch / "src"), **others}
