from __future__ import annotations

import contextlib
import socket

import pytest

from isthmus.bench.child import Child
from isthmus.bench.transfer_peers import _serve_sockets, digest
from isthmus.core.errors import StartError


def test_commands_are_answered_in_another_process() -> None:
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(contextlib.closing(Child(_serve_sockets, 4096, 1)))
        stack.enter_context(socket.create_connection(("127.0.0.1", child.hello)))
        assert len(child.ask(100)) == 16
        assert child.ask(100) == child.ask(100) != child.ask(200)


def test_one_that_ends_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartError, match="ended"):
        Child(digest, 1)
    assert "TypeError" in capfd.readouterr().err
