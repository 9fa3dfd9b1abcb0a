"""Which processes a launcher starts, and how one of a link comes back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from isthmus.cluster import launcher
from isthmus.cluster.hosts import planned_processes
from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.shaper import LinkSpec, Shape
from isthmus.config import Config
from tests.served import LIMIT_S


def test_a_pipeline_group_is_a_process_for_each_stage() -> None:
    config = Config.model_validate({"roles": {"prefill": {"count": 2, "pipeline": 2}, "decode": 1}})
    found = [(process.name, process.place.node, process.stage) for process in planned_processes(config)]
    assert found == [
        ("prefill-0", "prefill-0", 0),
        ("prefill-0.1", "prefill-0", 1),
        ("decode-0", "decode-0", 0),
    ]


class Waits:
    """In place of sleeping: how long somebody wants to, until it may go on."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self._go_on = asyncio.Semaphore(0)

    async def sleep(self, wait_s: float) -> None:
        self.asked.put_nowait(wait_s)
        await self._go_on.acquire()

    async def next(self) -> float:
        return await asyncio.wait_for(self.asked.get(), LIMIT_S)

    def go_on(self) -> None:
        self._go_on.release()


@contextlib.asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[LinkProcess, Waits]]:
    waits = Waits()
    monkeypatch.setattr(launcher, "sleep", waits.sleep)
    link = LinkProcess(("west", "east"), LinkSpec(Shape(delay_s=0.0), ((0,), (0, 0))))
    await link.start()
    watch = asyncio.create_task(link.watch())
    try:
        yield link, waits
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await link.stop()
        assert link._process is not None and link._process.returncode is not None


async def passes(port: int, server: asyncio.Server, came: asyncio.Event) -> bool:
    """Whether a connection to this port reaches the server."""
    came.clear()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = await asyncio.wait_for(reader.read(1), LIMIT_S)
    except ConnectionError:
        return False
    writer.close()
    return said == b"!" and came.is_set()


def test_a_link_comes_back_at_its_ports_with_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened and closed meanwhile counts, too; what is taken by somebody else is waited for, ever longer."""

    async def run() -> None:
        came = asyncio.Event()

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set()
            writer.write(b"!")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, watched(monkeypatch) as (link, waits):
            kept, left = link.open("east", target), link.open("east", target)
            assert kept is not None and left is not None and link.open("east", target) is None
            assert await passes(kept, server, came) and await passes(left, server, came)
            assert link._process is not None
            link._process.kill()
            assert await waits.next() == 1
            link.close("east", left)
            new = link.open("west", target)
            assert new is not None
            with socket.create_server(("127.0.0.1", kept)):
                for wait_s in (2, 4, 8, 16, 30, 30):
                    waits.go_on()
                    assert await waits.next() == wait_s
            waits.go_on()
            before = link._process
            while link._process is before or not await passes(kept, server, came):
                await asyncio.sleep(0.01)
            assert await passes(new, server, came) and not await passes(left, server, came)
            assert link.open("east", target) == left and await passes(left, server, came)
            link._process.kill()
            assert await waits.next() == 1, "it begins anew after a good start"

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_a_link_that_is_stopped_while_it_is_away_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with watched(monkeypatch) as (link, waits):
            assert link._process is not None
            link._process.kill()
            await waits.next()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
