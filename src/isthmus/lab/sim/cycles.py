"""No search for cycles of objects while a simulation runs: nothing that ends there is part of one.

A file of its own, for the command line loads it before it knows that anything is simulated.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles() -> Iterator[None]:
    """The collector rests meanwhile, if it was at work before."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
