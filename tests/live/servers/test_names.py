"""Names of prompts before plain servers, and what is known of caches: by tokens, by KV events, after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from isthmus.core.errors import ConfigError
from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.servers import fleet, kv_events
from isthmus.live.servers.naming import Naming
from isthmus.live.servers.router import Router
from isthmus.live.servers.state_file import StateFile
from isthmus.live.servers.told import Description

from .fake_server import Publisher
from .plain_fake import METRICS, WHOLE, FakeServer
from .test_router import RULES, ask, run, until

SIZE = 16
STARTED = "process_start_time_seconds 1.79510231405e+09\n"
SAMPLES = ((b'{"prompt": "a sample"}', (1, 2)), (b'{"messages": []}', (3,)))
NUMBERS = iter(range(1, 10**9))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet, "SILENCE_S", 60)


def prompt(tokens: list[int], **fields: Any) -> PassedRequest:
    """A streamed request whose tokens the gateway knows."""
    passed = PassedRequest(
        RequestId(f"n{next(NUMBERS)}"), "POST", "/v1/completions", (), b'{"stream": true}', "m", b"text",
        array("I", tokens).tobytes(), is_streamed=True,
    )  # fmt: skip
    return msgspec.structs.replace(passed, **fields)


@contextlib.asynccontextmanager
async def routed(*servers: FakeServer, state: Path | None = None) -> AsyncIterator[Router]:
    """A router before servers that are there already, which knows tokens."""
    file = StateFile(state) if state is not None else None
    if file is not None:
        file.load()
    router = Router(RULES, [server.url for server in servers], rejoin_s=0.2, samples=SAMPLES, state=file)
    async with router.run():
        yield router
        for pool in router._fleet._pools.values():
            pool.desk.check()


@contextlib.asynccontextmanager
async def serving(count: int, **facts: Any) -> AsyncIterator[list[FakeServer]]:
    servers = [FakeServer(**facts) for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


def conversation(number: int, length: int = 20 * SIZE) -> list[int]:
    return [number * 1000 + at for at in range(length)]


# Names.

LISTED = (
    {"id": "base", "root": "org/base", "parent": None},
    {"id": "alias", "root": "org/base", "parent": None},
    {"id": "adapter", "root": "/adapters/a", "parent": "base"},
    {"id": "other", "root": "/adapters/a", "parent": "base"},
)


def test_an_adapter_shares_no_blocks_and_another_name_of_the_model_all() -> None:
    naming = Naming(Description(LISTED, block_tokens=SIZE), knows_tokens=True)
    tokens = conversation(1)
    names = {
        name: naming.named(prompt(tokens, model=name)).names
        for name in ("base", "alias", "adapter", "other", "", "unknown")
    }
    assert names["base"] == names["alias"] == names[""] == names["unknown"]
    assert len({names["base"], names["adapter"], names["other"]}) == 3
    assert tuple(naming.of_events("", "adapter").names(tokens)) == names["adapter"]
    assert tuple(naming.of_events("", "").names(tokens)) == names["base"]


def test_models_without_a_root_are_models_of_their_own() -> None:
    naming = Naming(Description(({"id": "a"}, {"id": "b"}, {"id": "c", "root": ""})), knows_tokens=False)
    assert len({naming.named(prompt([1] * SIZE, model=name, prefix=b"x" * 999)).names for name in "abc"}) == 3


def test_an_alias_in_an_entry_is_the_model_of_that_entry() -> None:
    """llama.cpp lists other names so."""
    naming = Naming(Description(({"id": "a"}, {"id": "b", "aliases": ["small", 1]})), knows_tokens=True)
    names = {name: naming.named(prompt(conversation(1), model=name)).names for name in ("a", "b", "small")}
    assert names["a"] != names["b"] == names["small"]


def test_names_of_tokens_keep_apart_what_the_servers_keep_apart() -> None:
    naming = Naming(Description(({"id": "m"},), block_tokens=SIZE), knows_tokens=True)
    one, other = prompt(conversation(1), salt="1:a:"), prompt(conversation(1), salt="1:b:")
    assert naming.named(one) == naming.named(other), "the servers share them"
    salted = msgspec.structs.replace(one, cache_salt="secret")
    assert not set(naming.named(salted).names) & set(naming.named(one).names)
    assert tuple(naming.of_events("secret", "").names(conversation(1))) == naming.named(salted).names
    texts = [msgspec.structs.replace(each, tokens=b"", prefix=b"x" * 4 * SIZE) for each in (one, other)]
    assert not set(naming.named(texts[0]).names) & set(naming.named(texts[1]).names), "tenants are apart"
    assert naming.named(one).num_tokens == 20 * SIZE and naming.named(one).is_exact


@pytest.mark.parametrize("told", [0, 128, 1 << 20])
def test_blocks_are_those_of_the_server(told: int) -> None:
    naming = Naming(Description(({"id": "m"},), block_tokens=told), knows_tokens=True)
    assert naming.block_tokens == (told if told == 128 else 16)
    assert len(naming.named(prompt([7] * 1024)).names) == 1024 // naming.block_tokens


@pytest.mark.parametrize(("told", "is_exact"), [((1, 2), True), ((1, 3), False), ((), True)])
def test_another_tokenizer_than_the_servers_is_not_used(told: tuple[int, ...], is_exact: bool) -> None:
    async def test() -> None:
        async with serving(1) as (server,):
            server.tokens = {"prompt": told, "messages": (3,)}
            async with routed(server) as router:
                (pool,) = router._fleet._pools.values()
                assert pool.naming.named(prompt(conversation(1))).is_exact is is_exact
                assert (await ask(router, prompt(conversation(1)))).startswith(WHOLE)

    run(test)


# KV events.


class Publishing(Publisher):
    """KV events over TCP, as a plain server announces them."""

    def __init__(self) -> None:
        super().__init__("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self.number = 0

    @property
    def sources(self) -> dict[str, Any]:
        ports = [
            each.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2] for each in (self._out, self._router)
        ]
        return {
            "0": {
                "publisher": "zmq",
                "endpoint": f"tcp://*:{ports[0]}",
                "replay_endpoint": f"tcp://*:{ports[1]}",
            }
        }

    def tell(self, *events: dict[str, Any], **options: bool) -> None:
        self.say(self.number, msgspec.msgpack.encode([1.5, list(events), 0]), **options)
        self.number += 1

    def stores(self, tokens: list[int], first: int, **options: bool) -> None:
        """The server has computed a prompt; its blocks' hashes count from `first`."""
        count = len(tokens) // SIZE
        self.tell(
            {"type": "BlockStored", "block_hashes": list(range(first, first + count)), "parent_block_hash": None,
             "token_ids": tokens[: count * SIZE], "block_size": SIZE, "medium": "GPU"}, **options,
        )  # fmt: skip

    def removes(self, *hashes: int) -> None:
        self.tell({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"})


@contextlib.asynccontextmanager
async def publishing(server: FakeServer) -> AsyncIterator[Publishing]:
    publisher = Publishing()
    server.sources = publisher.sources
    task = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()


def blocks(router: Router, server: FakeServer) -> float:
    return router.gauges()["server_cache_blocks"][server.url]


def is_known(router: Router, server: FakeServer) -> bool:
    (found,) = [each for each in router._fleet.servers.values() if str(each.node) == server.url]
    return found.cache is not None and found.cache.is_known


def test_events_say_what_is_cached_and_nothing_else_does() -> None:
    async def test() -> None:
        async with serving(2) as (one, other), publishing(one) as publisher:
            publisher.stores(conversation(1), 100)
            async with routed(one, other) as router:
                await until(lambda: blocks(router, one) == 20)
                assert is_known(router, one) and not is_known(router, other)
                for _ in range(4):  # it is known there before it was ever sent there
                    await ask(router, prompt(conversation(1)))
                assert (len(one.bodies), len(other.bodies)) == (4, 0)
                assert router.gauges()["server_expected_tokens_total"][one.url] == 4 * 32, (
                    "as long as 40 tokens allow"
                )
                publisher.removes(*range(100, 120))
                await until(lambda: blocks(router, one) == 0)
                for number in range(2, 12):
                    await ask(router, prompt(conversation(number)))
                assert blocks(router, one) == 0 < blocks(router, other), "a belief is of the other alone"

    run(test)


@pytest.mark.parametrize("how", ["lost", "late", "unreadable", "deep"])
def test_a_cache_of_which_something_was_not_heard_is_believed(how: str) -> None:
    async def test() -> None:
        async with serving(1) as (server,), publishing(server) as publisher:
            if how == "late":
                publisher.number = 7  # the server keeps nothing of before
                publisher.stores(conversation(1), 100)
            async with routed(server) as router:
                if how != "late":
                    publisher.stores(conversation(1), 100)
                    publisher.stores(conversation(2), 200)
                    await until(lambda: blocks(router, server) == 40)
                await ask(router, prompt(conversation(1)))
                match how:
                    case "lost":
                        publisher.stores(conversation(3), 300, lost=True, keep=False)
                        publisher.stores(conversation(4), 400)
                    case "unreadable":
                        publisher.say(publisher.number, b"\xc1")
                    case "deep":
                        publisher.say(publisher.number, b"\x91" * 100_000 + b"\xc0")
                await until(lambda: not is_known(router, server))
                assert blocks(router, server) == 20, "what was asked here"
                await ask(router, prompt(conversation(5)))
                assert blocks(router, server) == 40

    run(test)


def test_a_stranger_at_the_socket_is_limited() -> None:
    """The server has 64 blocks: no more than twice as many are kept of it, whatever its socket says."""

    async def test() -> None:
        async with serving(1) as (server,), publishing(server) as publisher, routed(server) as router:
            for number in range(40):
                publisher.stores(conversation(number), 100 * number)
            publisher.stores([-1] * SIZE, 9000)
            publisher.removes(0)
            await until(lambda: blocks(router, server) == 6 * 20 - 1)

    run(test)


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"0": {"publisher": "null", "endpoint": "tcp://*:1"}},
        {"0": {"publisher": "zmq", "endpoint": "ipc:///tmp/x"}},
        {"0": {"publisher": "zmq", "endpoint": "tcp://*:99999"}},
        {
            "0": {"publisher": "zmq", "endpoint": "tcp://*:1"},
            "1": {"publisher": "zmq", "endpoint": "tcp://*:2"},
        },
        {"0": 7},
        [],
    ],
)
def test_events_that_cannot_be_followed_are_left(sources: Any) -> None:
    async def test() -> None:
        async with serving(1) as (server,):
            server.sources = sources
            async with routed(server) as router:
                await ask(router, prompt(conversation(1)))
                assert blocks(router, server) == 20 and not is_known(router, server)

    run(test)


# After a restart.


def placed(servers: list[FakeServer], since: list[int]) -> int:
    """The server that took the request after so many of each."""
    (at,) = [at for at, server in enumerate(servers) if len(server.bodies) > since[at]]
    return at


async def places(router: Router, servers: list[FakeServer], conversations: list[list[int]]) -> list[int]:
    found = []
    for each in conversations:
        since = [len(server.bodies) for server in servers]
        await ask(router, prompt(each))
        found.append(placed(servers, since))
    return found


def test_conversations_find_their_servers_after_a_restart_of_the_router(tmp_path: Path) -> None:
    async def test() -> None:
        conversations = [conversation(number) for number in range(32)]
        big = METRICS.replace('num_gpu_blocks="64"', 'num_gpu_blocks="4096"')
        state = tmp_path / "state"
        async with serving(4, metrics=big + STARTED) as servers:
            async with routed(*servers, state=state) as router:
                before = await places(router, servers, conversations)
                assert set(before) == {0, 1, 2, 3}
            assert state.stat().st_mode & 0o777 == 0o600
            async with routed(*servers, state=state) as router:
                assert await places(router, servers, conversations[::-1]) == before[::-1]
            servers[0].metrics = big + STARTED.replace("405", "406")  # it started anew
            async with routed(*servers, state=state) as router:
                assert blocks(router, servers[0]) == 0 < blocks(router, servers[1])
            assert not list(tmp_path.glob("*.tmp"))

    run(test)


@pytest.mark.parametrize("how", ["heard", "lost", "silent", "unsaid"])
def test_events_go_on_where_the_router_before_ended(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps only what came since: enough for who has heard what was before."""
    monkeypatch.setattr(kv_events, "REPLAY_S", 0.1 if how == "silent" else 60)

    async def test() -> None:
        started = "" if how == "unsaid" else STARTED
        async with serving(1, metrics=METRICS + started) as (server,), publishing(server) as publisher:
            async with routed(server, state=tmp_path / "state") as router:
                publisher.stores(conversation(1), 100)
                publisher.stores(conversation(1), 100)
                await until(lambda: blocks(router, server) == 20)
                await ask(router, prompt(conversation(1)))
            publisher.kept.clear()
            publisher.answers = how != "silent"
            publisher.stores(conversation(2), 200, keep=how != "lost")
            publisher.removes(*range(100, 120))
            async with routed(server, state=tmp_path / "state") as router:
                if how == "heard":
                    await until(lambda: blocks(router, server) == 40)
                    publisher.removes(*range(100, 110))
                    await until(lambda: blocks(router, server) == 30)
                    assert is_known(router, server)
                else:
                    await until(lambda: not is_known(router, server) and blocks(router, server) == 20)

    run(test)


@pytest.mark.parametrize("started", [STARTED, ""])
def test_a_server_that_was_away_and_did_not_start_anew_has_its_blocks(started: str) -> None:
    async def test() -> None:
        async with serving(1, metrics=METRICS + started) as (server,), routed(server) as router:
            await ask(router, prompt(conversation(1)))
            await server.stop()
            await until(lambda: not router.healthy)
            await server.start()
            await until(lambda: router.healthy)
            assert blocks(router, server) == (20 if started else 0)

    run(test)


def test_a_file_that_is_no_state_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt: no state file"):
        StateFile(file).load()
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file or directory"):
        StateFile(tmp_path / "nowhere" / "state").load()


def test_a_damaged_state_is_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "state"
    StateFile(file).load()
    file.write_bytes(file.read_bytes()[:-3])
    again = StateFile(file)
    again.load()
    assert again.take("s") is None and "is damaged" in caplog.text


def test_servers_that_are_not_wanted_any_more_are_not_kept(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(2, metrics=METRICS + STARTED) as (one, other):
            async with routed(one, other, state=tmp_path / "state") as router:
                for number in range(4):
                    await ask(router, prompt(conversation(number)))
            async with routed(one, state=tmp_path / "state") as router:
                await ask(router, prompt(conversation(1)))
        file = StateFile(tmp_path / "state")
        file.load()
        assert file.take(one.url) is not None and file.take(other.url) is None

    run(test)
