"""Builds a C file once per machine and loads it.

The library is kept in the cache folder under a name that digests sources, compiler, flags and CPU, and moved
into place in one step, so processes that start together do not disturb each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isthmus.config import cache_dir

log = logging.getLogger(__name__)


def library(sources: Sequence[Path], flags: Sequence[str], without: str) -> ctypes.CDLL | None:
    """`sources[0]` compiled; the others are what it includes.

    None where it cannot be built, with one warning that says `without` it what is used instead.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.warning("no C compiler found: %s; install gcc", without)
        return None
    try:
        path = _path(compiler, sources, flags)
        if not path.exists():
            _build([compiler, *flags, str(sources[0])], path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        log.warning("%s could not be built: %s: %s", sources[0].name, without, detail[-300:])
        return None


def _path(compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    texts = (source.read_bytes() for source in sources)
    identity = b"\0".join((*texts, version, " ".join(flags).encode(), _cpu_identity().encode()))
    digest = hashlib.sha256(identity).hexdigest()[:20]
    return cache_dir() / "kernels" / f"{sources[0].stem}-{digest}.so"


def machine_name() -> str:
    """Short, equal for CPUs that compute alike."""
    return hashlib.sha256(_cpu_identity().encode()).hexdigest()[:12]


def _cpu_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _build(command: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run([*command, "-o", temporary, "-lm"], check=True, capture_output=True)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
