"""When Python looks for cycles in a process that serves.

What comes as it starts (modules, weights, a tokenizer) is there for good: a node that imports PyTorch starts a tenth
sooner if nobody looks through all that as it grows, and later no token waits until somebody has.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Nobody looks for cycles until `started`, or the end of this."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def started() -> None:
    """What is there now is never looked through."""
    gc.freeze()
    gc.enable()
