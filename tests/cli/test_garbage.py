"""When a process that serves looks for cycles of objects: not as it starts, and never through what it started with."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from isthmus.cli import node, serve
from isthmus.core.errors import StartError
from isthmus.core.types import NodeId, Role
from isthmus.live.cluster.launcher import LaunchSpec
from isthmus.live.gateway import server

from .conftest import Command

SPEC = LaunchSpec(NodeId("mixed-0"), Role.MIXED, "127.0.0.1:1", "", "", 1, "{}")


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """What `tests/conftest.py` froze."""
    gc.unfreeze()
    interval = sys.getswitchinterval()  # of a node it is another
    yield
    sys.setswitchinterval(interval)
    gc.freeze()


def state() -> tuple[bool, bool]:
    """Whether cycles are looked for, and whether there is something that is not looked through."""
    return gc.isenabled(), gc.get_freeze_count() > 0


def test_a_node_looks_for_cycles_once_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Process:
        async def run(self) -> str:
            seen.append(state())
            return "over"

    @contextlib.asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[Process]:
        seen.append(state())
        yield Process()

    monkeypatch.setattr(node, "_opened", opened)
    assert node._run(SPEC, 0, watch_stdin=False) == "over"
    assert [*seen, state()] == [(False, False), (True, True), (True, True)]


def test_a_head_looks_for_cycles_once_it_has_started(isthmus: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Cluster:
        join_host, invitation = "127.0.0.1", ""

        @contextlib.asynccontextmanager
        async def run(self) -> AsyncIterator[None]:
            yield

        async def wait_ready(self) -> None:
            seen.append(state())
            raise StartError("no")

    async def serve_http(_: Any, bound: socket.socket, stop: asyncio.Event, **__: Any) -> None:
        with bound:
            await stop.wait()

    def assemble(*_: Any) -> tuple[Cluster, types.SimpleNamespace]:
        seen.append(state())
        return Cluster(), types.SimpleNamespace()

    monkeypatch.setattr(serve, "assemble", assemble)
    monkeypatch.setattr(server, "serve_http", serve_http)
    assert isthmus("serve", "--port", "0")[0] == StartError.exit_code
    assert [*seen, state()] == [(False, False), (True, True), (True, True)]


def test_who_cannot_start_looks_for_cycles_again(isthmus: Command) -> None:
    assert isthmus("serve", "--config", "missing.yaml")[0] == 2
    assert state() == (True, False)
