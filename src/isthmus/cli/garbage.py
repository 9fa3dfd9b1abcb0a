"""Garbage collection of a process that serves: off while it starts, and never over the objects that it started with.

Modules, weights and tokenizer live as long as the process. Without collections a node that imports PyTorch starts a
tenth sooner, and later no token waits for a collection that visits them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Disables garbage collection until `started` is called, or the context ends."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def started() -> None:
    """Enables garbage collection, which from now on skips the objects that exist already."""
    gc.freeze()
    gc.enable()
