"""Lines between two threads: over real sockets, plain and with TLS, and beside sessions in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from isthmus.live.messenger import Network, Session, TcpNetwork, TlsFiles
from isthmus.live.messenger.line import MAX_PAYLOAD, Answerer, Asker, LineLost
from isthmus.live.messenger.streams import Stream
from tests.certificates import make_certificate
from tests.memory_network import MemoryNetwork

from .test_network import LIMIT_S, Message, Note, Owner

Answers = Callable[[Answerer], None]


@pytest.fixture(params=["tcp", "tls", "memory"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Network:
    if request.param == "memory":
        return MemoryNetwork()
    return TcpNetwork(
        credentials=TlsFiles(**make_certificate(tmp_path, "ours")) if request.param == "tls" else None
    )


def echo(line: Answerer) -> None:
    """Answers with head and payload, but to "nothing"."""
    with contextlib.suppress(LineLost):
        while True:
            head, payload = line.next()
            line.answer(None if head == b"nothing" else memoryview(bytes(head) + bytes(payload)))
    line.hang_up()


@contextlib.asynccontextmanager
async def session(
    net: Network, answers: Answers | None = echo
) -> AsyncIterator[tuple[Session, Owner, Session]]:
    """Ours, and the other side's; lines there are answered by a thread."""
    here, there = Owner(), Owner()
    server, port = await net.listen("127.0.0.1", 0, Message, lambda: there)
    ours = await net.connect(f"127.0.0.1:{port}", Message, here, timeout_s=LIMIT_S)
    threads: list[threading.Thread] = []

    def begin(line: Answerer) -> None:
        assert answers is not None
        threads.append(threading.Thread(target=answers, args=(line,)))
        threads[-1].start()

    try:
        ours.send(Note("here"))
        await there.until(lambda: there.messages)
        assert there.session is not None
        if answers is not None:
            there.session.answer_lines(begin)
        yield ours, here, there.session
    finally:
        for each, owner in ((ours, here), (there.session, there)):
            if each is not None:
                each.abort("the test is over")
                await owner.until(lambda owner=owner: owner.reasons)
        server.close()
        for thread in threads:
            await asyncio.to_thread(thread.join, LIMIT_S)
            assert not thread.is_alive()


async def test_questions_are_answered_in_their_order(net: Network) -> None:
    def ask(line: Asker) -> None:
        asked = [line.ask(b"%d" % at, memoryview(b"x" * at)) for at in range(5)]
        nothing = line.ask(b"nothing", memoryview(b""))
        assert line.answer(nothing) is None
        for at in (4, 0, 3, 2, 1):
            answer = line.answer(asked[at])
            assert answer is not None and bytes(answer) == b"%d" % at + b"x" * at

    async with session(net) as (ours, _, _):
        line = await ours.line(LIMIT_S)
        await asyncio.to_thread(ask, line)
        stat = ours.stat()
        assert stat.bytes_out > line.bytes_out == 6 * 12 + 5 + 7 + 10 and line.bytes_in == 6 * 8 + 5 + 10


async def test_bytes_of_lines_that_ended_count_still(net: Network) -> None:
    async with session(net) as (ours, _, theirs):
        told = [(0, 0, 0)]
        for _ in range(3):
            line = await ours.line(LIMIT_S)
            await asyncio.to_thread(lambda: line.answer(line.ask(b"q" * 1000, memoryview(b""))))  # noqa: B023
            here, there = ours.stat(), theirs.stat()
            told.append((here.bytes_in, here.bytes_out, there.bytes_in))
            assert all(now >= before + 1000 for before, now in zip(told[-2], told[-1], strict=True))
            line.hang_up()


async def test_several_threads_ask(net: Network) -> None:
    """More is under way than the sockets hold."""
    data = os.urandom(1 << 19)

    def ask(line: Asker, name: int) -> None:
        for at in range(30):
            asked = [
                line.ask(b"%d %d %d" % (name, at, each), memoryview(data)[: 7 << at % 17]) for each in range(3)
            ]
            for each in (2, 0, 1):
                answer = line.answer(asked[each])
                assert answer is not None
                head = b"%d %d %d" % (name, at, each)
                assert answer[: len(head)] == head and answer[len(head) :] == data[: 7 << at % 17]

    async with session(net) as (ours, _, _):
        line = await ours.line(LIMIT_S)
        await asyncio.gather(*[asyncio.to_thread(ask, line, name) for name in range(4)])


@pytest.mark.parametrize("end", ["here", "there"])
async def test_a_line_ends_with_its_session(net: Network, end: str) -> None:
    waits = threading.Semaphore(0)

    def silent(line: Answerer) -> None:
        for _ in range(3):
            line.next()
            waits.release()
        with pytest.raises(LineLost):
            line.next()
        line.hang_up()

    def ask(line: Asker) -> None:
        with pytest.raises(LineLost, match=r"hung up|reset by peer"):
            line.answer(line.ask(b"question", memoryview(b"")))
        with pytest.raises(LineLost):
            line.answer(line.ask(b"another", memoryview(b"")))

    async with session(net, silent) as (ours, here, theirs):
        line = await ours.line(LIMIT_S)
        asking = [asyncio.create_task(asyncio.to_thread(ask, line)) for _ in range(3)]
        for _ in asking:
            await asyncio.to_thread(waits.acquire, timeout=LIMIT_S)
        (ours if end == "here" else theirs).abort("it is over")
        await here.until(lambda: here.reasons)
        await asyncio.gather(*asking)
        assert line.is_over
        with pytest.raises(ConnectionError):
            await ours.line(LIMIT_S)


async def test_who_is_silent_for_too_long_is_given_up(net: Network) -> None:
    over = threading.Event()

    def silent(line: Answerer) -> None:
        over.wait(LIMIT_S)
        line.hang_up()

    def ask(line: Asker) -> None:
        question = line.ask(b"question", memoryview(b""))
        with pytest.raises(LineLost, match=r"nothing came in 0\.05 s"):
            line.answer(question)
        over.set()

    async with session(net, silent) as (ours, _, _):
        await asyncio.to_thread(ask, await ours.line(0.05))


async def test_lines_are_taken_by_who_answers_alone(net: Network) -> None:
    async with session(net, None) as (ours, _, theirs):
        with pytest.raises(ConnectionError, match="answers on a line"):
            await ours.line(LIMIT_S)
        with pytest.raises(ConnectionError):
            await theirs.line(LIMIT_S)


@pytest.mark.parametrize("said", [struct.pack("<Q", MAX_PAYLOAD + 1), struct.pack("<Q", 1) + b"ab"])
def test_an_answer_that_cannot_be_is_the_end(said: bytes) -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    with contextlib.closing(there):
        line = Asker(Stream(here), LIMIT_S)
        there.sendall(said)
        first = line.ask(b"", memoryview(b""))
        with pytest.raises(LineLost, match="an answer"):
            assert line.answer(first) == b"a"
            line._read()
        line.hang_up()


def test_a_question_too_long_is_the_end() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    with contextlib.closing(there):
        line = Answerer(Stream(here))
        there.sendall(struct.pack("<IQ", 1, MAX_PAYLOAD + 1))
        with pytest.raises(LineLost, match="too long"):
            line.next()
        line.hang_up()
