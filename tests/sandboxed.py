"""What runs in the sandboxes of `test_sandbox.py`: answers tell what a worker is, or it does what libraries do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from isthmus import sandbox
from isthmus.core.errors import ModelError

KEPT: list[bytes] = []


def _answer(question: bytes) -> Sequence[bytes]:
    word, _, rest = question.partition(b" ")
    KEPT.append(question)
    match word:
        case b"echo":
            return [b"<", rest, b">"]
        case b"count":
            return [str(len(KEPT)).encode()]
        case b"environment":
            return [" ".join(os.environ).encode()]
        case b"pid":
            return [str(os.getpid()).encode()]
        case b"crash":
            sandbox.note("what crashes")
            ctypes.string_at(1)
        case b"spin":
            while True:
                pass
        case b"brief":
            with sandbox.cpu_limit(0.05):
                while True:
                    pass
        case b"take":
            KEPT.append(bytearray(int(rest)))  # type: ignore[arg-type]
            return [b"%d" % sandbox.grown_bytes()]
        case b"deep":
            return [str(_deep(int(rest))).encode()]
        case b"bug":
            raise KeyError("a bug")
    return [b""]


def _deep(depth: int) -> int:
    """The C stack, as a library's recursion would use it."""
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)

    def down(left: int) -> int:
        return compare(down)(left - 1) + 1 if left else 0

    import sys

    sys.setrecursionlimit(10 * depth)
    return down(depth)


def _load(setup: bytes) -> sandbox.Answer:
    if setup == b"refuse":
        raise ModelError("no such model")
    KEPT.append(setup)
    return _answer


def main() -> None:
    sandbox.serve(_load, idle_s=None)


def impatient() -> None:
    sandbox.serve(_load, idle_s=0.05)
