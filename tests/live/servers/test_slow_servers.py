"""Plain servers that live and do not answer in time: requests go elsewhere, end in the time allowed, and come back."""

from __future__ import annotations

import asyncio
import json

import pytest

from isthmus.core.errors import TimedOutError
from isthmus.live.servers import plain, probing

from .plain_fake import WHOLE, FakeServer
from .test_router import LONG, RULES, ask, asked, read, routed, run, until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "TICK_S", 0.05)


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_answers_no_request_is_left_and_used_again(stream: bool) -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            for number in range(6):
                await ask(router, asked(f"{number} {LONG}", stream=stream, max_tokens=4))
            one.fault = "mute"
            for number in range(6):
                answer = await ask(router, asked(f"{number} {LONG} {number}", stream=stream, max_tokens=4))
                assert answer.startswith(WHOLE if stream else b'{"vendor"')
            assert router.gauges()["server_failures_total"] == {one.url: 0, other.url: 0}
            waited = [each for each in one.bodies if b"256" not in each]
            one.fault = ""

            async def is_used() -> bool:
                before = len(_asked_by_clients(one))
                await ask(router, asked(f"{len(other.bodies)} {LONG}", stream=stream, max_tokens=4))
                return len(_asked_by_clients(one)) > before

            assert waited, "nothing came to it"
            async with asyncio.timeout(60):
                while not await is_used():
                    await asyncio.sleep(0.01)

    run(test)


def _asked_by_clients(server: FakeServer) -> list[bytes]:
    """Bodies of requests, without probes."""
    return [body for body in server.bodies if json.loads(body)["max_tokens"] != 1]


def test_no_answer_is_waited_for_longer_than_the_time_allowed() -> None:
    """The time between bytes, which would end it too, is a server's and longer here."""

    async def test() -> None:
        server = FakeServer()
        async with routed(server, timeout_s=60) as router:
            router._timeout_s = 0.3
            server.fault = "mute"
            async with asyncio.timeout(30):
                with pytest.raises(TimedOutError, match=r"no answer began within 0\.3 s"):
                    await router.forward(asked())
            await until(lambda: server.num_left > 0)

    run(test)


def test_a_stream_that_stops_ends_in_the_time_allowed() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server, timeout_s=1) as router:
            server.gate.clear()
            answer = await router.forward(asked())
            told = json.loads((await read(answer)).rstrip().rpartition(b"data: ")[2])
            assert told["error"]["code"] == "timeout"

    run(test)


def test_a_stale_connection_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "STALE_S", 60)
    monkeypatch.setattr(plain, "KEPT_S", 60)

    async def test() -> None:
        server = FakeServer()
        async with routed(server, rules=RULES) as router:
            for _ in range(3):
                await ask(router, asked())
                server.num_stale = 1
                assert (await ask(router, asked())).startswith(WHOLE)
                assert not server.num_stale, "no connection was kept"
            assert router.gauges()["server_failures_total"] == {server.url: 0}

    run(test)


def test_a_connection_that_breaks_later_is_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks later than a stale connection would is another attempt, elsewhere."""
    monkeypatch.setattr(plain, "STALE_S", 0)

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            for number in range(4):
                await ask(router, asked(f"{number} {LONG}"))
            one.num_stale = other.num_stale = 1
            assert (await ask(router, asked())).startswith(WHOLE)
            assert sum(router.gauges()["server_failures_total"].values()) >= 1

    run(test)
