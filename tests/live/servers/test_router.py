"""Plain servers behind one conductor: where requests go, what passes, and what becomes of them when servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from isthmus.core.conductor import Rules
from isthmus.core.errors import IsthmusError, RequestError, StartError, UnavailableError
from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.gateway.status import RouterStatus
from isthmus.live.servers import fleet
from isthmus.live.servers.router import PassedBack, Router

from .plain_fake import WHOLE, FakeServer

LONG = "an old story of the sea and of those who went to it " * 8
RULES = Rules(policy="isthmus", max_attempts=3, wait_ms=200)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet, "SILENCE_S", 60)


@contextlib.asynccontextmanager
async def routed(
    *servers: FakeServer, rules: Rules = RULES, rejoin_s: float = 0.2, timeout_s: float | None = None
) -> AsyncIterator[Router]:
    for server in servers:
        await server.start()
    router = Router(rules, [server.url for server in servers], rejoin_s=rejoin_s, timeout_s=timeout_s)
    try:
        async with router.run():
            yield router
            assert not router._open, "a request never ended"
            for pool in router._fleet._pools.values():
                pool.desk.check()
    finally:
        for server in servers:
            await server.stop()


NUMBERS = iter(range(1, 10**9))


def asked(text: str = LONG, *, stream: bool = True, model: str = "m", **more: Any) -> PassedRequest:
    body = json.dumps({"model": model, "prompt": text, "stream": stream, **more}).encode()
    return PassedRequest(
        RequestId(f"r{next(NUMBERS)}"), "POST", "/v1/completions?a=%20b", (("content-type", "application/json"),), body,
        model, text.encode(), is_streamed=stream,
    )  # fmt: skip


async def read(answer: PassedBack) -> bytes:
    return b"".join([chunk async for chunk in answer.chunks()])


async def ask(router: Router, passed: PassedRequest) -> bytes:
    return await read(await router.forward(passed))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(limited())


def test_requests_and_answers_pass_as_they_came() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server) as router:
            passed = asked(stream=False, vendor_field={"deep": [1, 2.5, None]})
            answer = await router.forward(passed)
            assert answer.status == 200 and (b"X-Vendor", b"kept") in list(answer.headers)
            assert json.loads(await read(answer)) == {"vendor": 1, **json.loads(passed.body)}
            method, target, headers, body = server.asked[-1]
            assert (method, target, body) == ("POST", "/v1/completions?a=%20b", passed.body)
            assert "User-Agent" not in headers and "Accept-Encoding" not in headers
            assert (await ask(router, asked())).startswith(WHOLE)
            refused = await router.forward(asked("wrong", stream=False))
            assert refused.status == 422 and b"no such field" in await read(refused)
            assert refused.num_tokens == (0, 0)
            assert router.gauges()["server_cached_tokens_total"] == {server.url: 32}
            told = await router.forward(asked())
            assert told.num_tokens == (len(LONG) // 4, 0), "as long as it says nothing else"
            await read(told)
            assert told.num_tokens == (40, 4)

    run(test)


def test_a_prompt_goes_where_its_beginning_was_computed() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            for number in range(8):
                for more in ("", " and", " and so on"):
                    await ask(router, asked(f"{number} {LONG}{more}"))
            for server in (one, other):
                texts = [json.loads(body)["prompt"] for body in server.bodies]
                assert len(texts) >= 6, "nothing came here"
            beginnings = [{json.loads(body)["prompt"][0] for body in server.bodies} for server in (one, other)]
            assert not beginnings[0] & beginnings[1], "a conversation changed its server"

    run(test)


def test_a_conversation_goes_on_where_its_answer_was_generated() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server) as router:
            text = "a" * (5 * 64 + 13 * 4)  # four tokens of an answer fill its sixth block
            await ask(router, asked(text))
            for tail in ("b", "c"):
                answer = await router.forward(asked(text + tail * 200))
                assert isinstance(answer, PassedBack) and answer._request.believed == 6
                await read(answer)

    run(test)


def test_an_answer_that_is_not_streamed_is_no_prompt_in_the_queue() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server) as router:
            server.gate.clear()
            waiting = asyncio.create_task(router.forward(asked(stream=False)))
            (pool,) = router._fleet._pools.values()
            (node,) = pool.desk.conductor.view.nodes.values()
            await until(lambda: bool(server.bodies) and not node.prefills)
            assert not waiting.done()
            server.gate.set()
            assert (await read(await waiting)).startswith(b'{"vendor": 1')

    run(test)


def test_an_error_is_tried_elsewhere_and_the_last_one_passes() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            one.fault = "error"
            for number in range(4):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            other.fault = "error"
            answer = await router.forward(asked())
            assert answer.status == 500 and b"is ill" in await read(answer)

    run(test)


def test_a_dead_server_is_left_and_used_again() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            await one.stop()
            for number in range(4):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            await until(lambda: router.gauges()["server_up"] == {one.url: 0, other.url: 1})
            await one.start()
            await until(lambda: router.gauges()["server_up"] == {one.url: 1, other.url: 1})
            await other.stop()
            assert (await ask(router, asked())).startswith(WHOLE)
            await one.stop()
            with pytest.raises(UnavailableError):
                await router.forward(asked())
            assert not router.healthy and router.models() == []
            await one.start()
            await other.start()

    run(test)


def test_a_server_that_hangs_is_left_with_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stands still the other one may be left, too: requests wait until it is back."""
    monkeypatch.setattr(fleet, "SILENCE_S", 0.3)

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        patient = Rules(policy="isthmus", wait_ms=60_000)
        async with routed(one, other, rules=patient, rejoin_s=60) as router:
            one.fault = "hang"
            answers = await asyncio.gather(*[ask(router, asked(f"{number} {LONG}")) for number in range(6)])
            assert all(answer.startswith(WHOLE) for answer in answers)
            assert router.gauges()["server_leaves_total"][one.url] >= 1
            one.fault = ""
            await until(lambda: router.gauges()["server_up"][one.url] == 1)

    run(test)


def test_an_answer_that_breaks_off_ends_with_an_error_event() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server) as router:
            server.fault = "cut"
            answer = await ask(router, asked())
            assert answer.startswith(WHOLE[: WHOLE.index(b"three") - 60]), "what was sent stays"
            assert json.loads(answer.rstrip().rpartition(b"data: ")[2])["error"]["code"] == "unavailable"
            server.fault = ""
            assert (await ask(router, asked())).startswith(WHOLE)

    run(test)


def test_a_server_that_dies_amid_answers_ends_each_once() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            for server in (one, other):
                server.gate.clear()
            answers = [await router.forward(asked(f"{number} {LONG}")) for number in range(6)]
            reading = [asyncio.create_task(read(answer)) for answer in answers]
            await one.stop()
            for server in (one, other):
                server.gate.set()
            ends = [b"unavailable" in answer for answer in await asyncio.gather(*reading)]
            assert ends.count(True) == len(one.bodies) and ends.count(False) == len(other.bodies)
            await one.start()

    run(test)


@pytest.mark.parametrize("when", ["amid", "unread", "before"])
def test_a_client_that_leaves_takes_its_request_along(when: str) -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server) as router:
            if when == "unread":
                server.gate.clear()
                (await router.forward(asked())).close()
            elif when == "amid":
                server.gate.clear()
                chunks = (await router.forward(asked())).chunks()
                await anext(chunks)
                await chunks.aclose()
            else:
                server.fault = "mute"
                waiting = asyncio.create_task(router.forward(asked()))
                await until(lambda: len(server.bodies) == 1)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                server.fault = ""
            await until(lambda: server.num_left > 0)
            assert router.gauges()["server_requests_running"][server.url] == 0

    run(test)


def test_requests_go_by_their_model() -> None:
    async def test() -> None:
        one, other = FakeServer("a", "a-lora"), FakeServer("b")
        async with routed(one, other) as router:
            assert [each["id"] for each in router.models()] == ["a", "a-lora", "b"]
            for name in ("a", "a-lora", "b", "b", "b"):
                assert (await ask(router, asked(model=name))).startswith(WHOLE)
            assert [len(server.bodies) for server in (one, other)] == [2, 3]
            with pytest.raises(RequestError, match="'c' does not exist; there are a, a-lora, b"):
                await router.forward(asked(model="c"))

    run(test)


def test_a_server_that_lists_other_models_is_asked_for_those() -> None:
    async def test() -> None:
        server = FakeServer("a")
        async with routed(server) as router:
            await server.stop()
            await until(lambda: not router.healthy)
            server.models = ("b",)
            await server.start()
            await until(lambda: router.healthy)
            for name in ("b", "", "no name that is known"):
                assert (await ask(router, asked(model=name))).startswith(WHOLE)

    run(test)


def test_full_servers_refuse() -> None:
    async def test() -> None:
        server = FakeServer()
        async with routed(server, rules=Rules(policy="isthmus", max_requests=1)) as router:
            server.gate.clear()
            answer = await router.forward(asked())
            with pytest.raises(IsthmusError) as refused:
                await router.forward(asked())
            assert refused.value.http_status == 429
            server.gate.set()
            assert (await read(answer)).startswith(WHOLE)

    run(test)


def test_what_is_no_server_is_told_at_the_start() -> None:
    async def test() -> None:
        server = FakeServer()
        await server.start()
        await server.stop()
        router = Router(RULES, [server.url], rejoin_s=0.2)
        with pytest.raises(StartError, match=r"no server answers: http://127\.0\.0\.1"):
            async with router.run():
                pass

    run(test)


@pytest.mark.parametrize(
    ("metrics", "kv_tokens", "kind"),
    [
        ('vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1\n', 3200, "vllm"),
        ("sglang:max_total_num_tokens{model_name=\"m\"} 4096.0\nsglang:num_running_reqs 0\n", 4096, "sglang"),
        ("something_else 1\n", 0, ""),
    ],
)  # fmt: skip
def test_a_server_says_what_it_is(metrics: str, kv_tokens: int, kind: str) -> None:
    async def test() -> None:
        server = FakeServer(metrics=metrics)
        async with routed(server) as router:
            told = msgspec.json.encode({"servers": router.status()})
            (status,) = msgspec.json.decode(told, type=RouterStatus).servers
            assert (status.models, status.kv_tokens, status.kind) == (("m",), kv_tokens, kind)
            assert len(router.lines()) == 1

    run(test)
