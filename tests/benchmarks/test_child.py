from __future__ import annotations

import contextlib
import os

import pytest

from isthmus.benchmarks.child import Child, Pipe
from isthmus.errors import StartError


def answer(pipe: Pipe, first: int) -> None:
    pipe.send({"pid": os.getpid(), "first": first})
    print("what is printed does not disturb the pipe")
    with contextlib.suppress(EOFError):
        while True:
            (data, count) = pipe.recv()
            pipe.send(data * count)


def leave(pipe: Pipe) -> None:
    raise SystemExit(3)


def test_commands_are_answered_in_another_process() -> None:
    with contextlib.closing(Child(answer, 7)) as child:
        assert child.hello["first"] == 7 and child.hello["pid"] != os.getpid()
        assert child.ask(b"ab", 50_000) == b"ab" * 50_000
        assert child.ask(b"", 1) == b""


def test_one_that_ends_is_told() -> None:
    with pytest.raises(StartError, match="ended"):
        Child(leave)
