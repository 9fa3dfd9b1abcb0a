"""Servers come and go while a router runs: each request ends once, and a server that leaves ends those that it has."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from isthmus.core.errors import RequestError, StartError, UnavailableError
from isthmus.live.gateway.status import RouterStatus
from isthmus.live.servers import fleet, members
from isthmus.live.servers.lookup import LookUpError
from isthmus.live.servers.members import Members
from isthmus.live.servers.router import Router

from .plain_fake import WHOLE, FakeServer
from .test_router import LONG, RULES, ask, asked, read, routed, run, until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet, "SILENCE_S", 60)
    monkeypatch.setattr(members, "LOOK_UP_S", 0.02)


@asynccontextmanager
async def running(*servers: FakeServer) -> AsyncIterator[None]:
    """Servers that the router does not know yet."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()


def states(router: Router) -> dict[str, str]:
    told = msgspec.json.decode(msgspec.json.encode({"servers": router.status()}), type=RouterStatus)
    return {each.server: "draining" if each.draining else "up" if each.up else "down" for each in told.servers}


def test_a_server_that_is_removed_ends_its_requests_and_gets_no_new_ones() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            one.gate.clear()
            under_way = []
            while not one.bodies:
                under_way.append(await router.forward(asked(f"{len(under_way)} {LONG}")))
            (line,) = await router.change_servers([], [one.url])
            assert line == f"{one.url}: gets no new requests, and is removed when {len(one.bodies)} have ended"
            assert states(router) == {one.url: "draining", other.url: "up"}
            assert router.gauges()["server_up"] == {one.url: 0, other.url: 1}
            for more in range(4):  # of which it has the beginning
                assert (await ask(router, asked(f"{len(under_way) - 1} {LONG} {more}"))).startswith(WHOLE)
            assert len(one.bodies) == 1
            one.gate.set()
            for answer in under_way:
                assert (await read(answer)).startswith(WHOLE)
            assert states(router) == {other.url: "up"}
            assert router.gauges()["server_leaves_total"] == {other.url: 0}

    run(test)


def test_a_server_that_is_added_joins_without_a_look_at_the_others() -> None:
    async def test() -> None:
        one, new = FakeServer(), FakeServer("m", "of-new")
        async with routed(one) as router, running(new):
            one.gate.clear()
            answer = await router.forward(asked())
            assert await router.change_servers([new.url.removeprefix("http://") + "/v1"], []) == [
                f"{new.url}: m, of-new, vllm, 1,024 tokens of KV memory"
            ]
            assert (await ask(router, asked(model="of-new"))).startswith(WHOLE) and len(new.bodies) == 1
            one.gate.set()
            assert (await read(answer)).startswith(WHOLE)
            assert await router.change_servers([new.url], []) != [], "again: nothing changes"
            assert await router.change_servers([], [new.url]) == [f"{new.url}: is removed"]
            assert (await ask(router, asked(model="of-new"))).startswith(WHOLE), "servers know their names best"
            assert len(one.bodies) == 2 and [each["id"] for each in router.models()] == ["m"]

    run(test)


@pytest.mark.parametrize(
    "orders", [*itertools.product("arbe", repeat=4), *itertools.product("Arbe", repeat=3)], ids="".join
)
def test_a_server_is_added_and_removed_in_any_order(orders: tuple[str, ...]) -> None:
    """a: added, A: added while the next order comes, r: removed, b: a request begins, e: the oldest one ends. A server
    that has a request ends it, whatever comes after, and what is wanted last is there in the end."""

    async def test() -> None:
        stays, comes = FakeServer(), FakeServer()
        async with routed(stays) as router, running(comes):
            wanted, answers, number = False, [], 0
            stays.gate.clear()
            comes.gate.clear()
            for order in orders:
                match order:
                    case "A":
                        router.change(add=[comes.url], remove=[])
                        wanted = True
                    case "a":
                        await router.change_servers([comes.url], [])
                        wanted = True
                    case "r" if wanted:
                        await router.change_servers([], [comes.url])
                        wanted = False
                    case "b":
                        number += 1
                        before = len(comes.bodies)
                        answers.append(await router.forward(asked(f"{number} {LONG}")))
                        assert wanted or len(comes.bodies) == before, "a new request where none is to go"
                    case "e" if answers:
                        for server in (stays, comes):
                            server.gate.set()
                        assert (await read(answers.pop(0))).startswith(WHOLE)
                        for server in (stays, comes):
                            server.gate.clear()
            for server in (stays, comes):
                server.gate.set()
            for answer in answers:
                assert (await read(answer)).startswith(WHOLE)
            await router._fleet.settled()
            assert states(router) == {stays.url: "up"} | ({comes.url: "up"} if wanted else {})
            if wanted:
                await router.change_servers([], [stays.url])
                assert (await ask(router, asked("last"))).startswith(WHOLE)

    run(test)


def test_one_server_takes_the_place_of_another_and_no_request_finds_none() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one) as router, running(other):
            other.fault = "hang"
            changing = asyncio.create_task(router.change_servers([other.url], [one.url]))
            await until(lambda: other.url in states(router))
            assert (await ask(router, asked())).startswith(WHOLE) and states(router)[one.url] == "up"
            await other.stop()
            other.fault = ""
            await changing
            assert states(router) == {other.url: "down"}, "it was asked"
            await other.start()
            await until(lambda: router.healthy)
            await router.change_servers([one.url], [other.url])
            assert (await ask(router, asked())).startswith(WHOLE) and states(router) == {one.url: "up"}

    run(test)


@pytest.mark.parametrize("fault", ["dead", "hung"])
def test_a_server_that_fails_as_it_drains_is_gone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stands still the other one may be left, too: requests wait until it is back."""
    monkeypatch.setattr(fleet, "SILENCE_S", 0.3)

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        patient = msgspec.structs.replace(RULES, wait_ms=60_000)
        async with routed(one, other, rules=patient, rejoin_s=60) as router:
            one.fault = "hang"
            answers = [asyncio.create_task(ask(router, asked(f"{number} {LONG}"))) for number in range(6)]
            await until(lambda: router.gauges()["server_requests_running"].get(one.url, 0) > 0)
            router.change(add=[], remove=[one.url])
            if fault == "dead":
                await one.stop()
            assert all(answer.startswith(WHOLE) for answer in await asyncio.gather(*answers))
            await until(lambda: one.url not in states(router))
            if fault == "dead":
                await one.start()

    run(test)


def test_the_error_of_a_server_that_has_left_passes_back() -> None:
    """Nobody else can take the request, and its server goes as soon as it has failed."""

    async def test() -> None:
        one = FakeServer()
        async with routed(one) as router:
            one.fault = "error"
            one.gate.clear()
            waiting = asyncio.create_task(router.forward(asked()))
            await until(lambda: bool(one.bodies))
            router.change(add=[], remove=[one.url])
            assert states(router) == {one.url: "draining"}
            one.gate.set()
            await until(lambda: states(router) == {})
            answer = await waiting
            assert answer.status == 500 and b"is ill" in await read(answer)

    run(test)


def test_a_server_that_never_answered_is_removed_at_once() -> None:
    async def test() -> None:
        one, dead = FakeServer(), FakeServer()
        await dead.start()
        await dead.stop()
        async with routed(one) as router:
            assert await router.change_servers([dead.url], []) == [
                f"{dead.url}: does not answer; it is asked every 0.05 s"
            ]
            assert states(router) == {one.url: "up", dead.url: "down"}
            assert await router.change_servers([], [dead.url]) == [f"{dead.url}: is removed"]
            await router.change_servers([dead.url], [])
            await dead.start()
            await until(lambda: states(router)[dead.url] == "up")
            await router.change_servers([], [one.url, dead.url])
            assert not router.healthy and states(router) == {}
            with pytest.raises(UnavailableError, match="no server is there"):
                await router.forward(asked())
            await dead.stop()

    run(test)


def test_what_cannot_be_changed_changes_nothing() -> None:
    async def test() -> None:
        one = FakeServer()
        async with routed(one) as router:
            with pytest.raises(RequestError, match=f"http://x:1 is not here; there are {one.url}"):
                await router.change_servers([], [one.url, "x:1"])
            with pytest.raises(RequestError, match="'ftp://x' is no server: write http://HOST:PORT"):
                await router.change_servers(["ftp://x"], [one.url])
            assert states(router) == {one.url: "up"}

    run(test)


class Names:
    """A DNS of its own. None: the look-up fails."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, ...] | None] = {}
        self.num_asked = 0

    async def look_up(self, entry: str) -> tuple[str, ...]:
        self.num_asked += 1
        found = self.of.get(entry)
        if found is None:
            raise LookUpError("nobody knows")
        return found

    async def asked_again(self) -> None:
        """Returns when what is known now has been told."""
        asked = self.num_asked
        await until(lambda: self.num_asked > asked + 1)


def test_a_name_stands_for_the_servers_that_it_has_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names()
    monkeypatch.setattr(members, "look_up", names.look_up)

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        name = "dns+http://servers:80"
        async with running(one, other):
            names.of[name] = (one.url,)
            router = Router(RULES, [name], rejoin_s=0.2)
            async with router.run():
                assert states(router) == {one.url: "up"}
                names.of[name] = (one.url, other.url)
                await until(lambda: states(router) == {one.url: "up", other.url: "up"})
                names.of[name] = None
                await names.asked_again()
                assert len(states(router)) == 2 and caplog.text.count("nobody knows") == 1
                names.of[name] = (other.url,)
                await until(lambda: states(router) == {other.url: "up"})
                with pytest.raises(RequestError, match=re.escape(f"{other.url} is one of {name}: remove that")):
                    await router.change_servers([], [other.url])
                await router.change_servers([other.url], [])
                await router.change_servers([], [name])
                assert states(router) == {other.url: "up"}, "it is named by itself, too"
                asked_then = names.num_asked
                assert await router.change_servers(["dns+http://typo:80"], []) == [
                    "dns+http://typo:80: nobody knows"
                ]
                assert names.num_asked > asked_then
                await router.change_servers([], ["dns+http://typo:80"])

    run(test)


def test_names_that_cannot_be_looked_up_are_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "look_up", Names().look_up)

    async def test() -> None:
        router = Router(RULES, ["dns+http://typo:80"], rejoin_s=0.2)
        with pytest.raises(StartError, match=r"no server answers: dns.*typo:80: nobody knows"):
            async with router.run():
                pass

    run(test)


def test_a_name_of_too_many_servers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names, wanted = Names(), []
    monkeypatch.setattr(members, "look_up", names.look_up)

    async def test() -> None:
        names.of["k8s://n/a=b:1"] = tuple(f"http://{number}:1" for number in range(members.MAX_URLS + 1))
        some = Members(["k8s://n/a=b:1"], wanted.append)
        async with some.run():
            assert set(wanted) == {()} and "1,025 servers" in some.reasons["k8s://n/a=b:1"]

    run(test)
