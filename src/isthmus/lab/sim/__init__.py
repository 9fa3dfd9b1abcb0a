"""The simulated world: virtual time, networks, disks, faults, workloads, reports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles() -> Iterator[None]:
    """Pauses the cycle collector: nothing that a simulation drops is part of a cycle. Resumes it if it was enabled."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
