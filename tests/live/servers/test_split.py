"""Prefill and decode on separate servers: what both legs say, when a prompt stays, and what becomes of kept KV."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.conductor import (
    Conductor,
    FirstToken,
    NodeJoined,
    PrefillFinished,
    RequestArrived,
    Route,
    Rules,
)
from isthmus.core.errors import OverloadedError, RequestError, UnavailableError
from isthmus.core.types import NS_PER_S, NodeId, PassedRequest, RequestId, Role
from isthmus.live.servers import fleet, split
from isthmus.live.servers.router import Router

from .plain_fake import WHOLE, FakeServer
from .split_fake import FakeHalf, FakeSglang, Kept, Rooms
from .test_router import LONG, RULES, ask, asked, read, run, until

THRESHOLD = 64
"""Tokens of four bytes: `LONG` has more, `SHORT` fewer."""
SHORT = "an old story"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet, "SILENCE_S", 60)


@contextlib.asynccontextmanager
async def routed(
    prefill: Sequence[FakeServer],
    decode: Sequence[FakeServer],
    mixed: Sequence[FakeServer] = (),
    rules: Rules = RULES,
    threshold: int | None = THRESHOLD,
    rejoin_s: float = 0.2,
) -> AsyncIterator[Router]:
    for server in (*prefill, *decode, *mixed):
        await server.start()
    roles = {server.url: Role.PREFILL for server in prefill} | {server.url: Role.DECODE for server in decode}
    entries = [server.url for server in (*mixed, *prefill, *decode)]
    rules = split.divided(rules, threshold)
    router = Router(rules, entries, roles=roles, rejoin_s=rejoin_s)
    try:
        async with router.run():
            yield router
            assert not router._open, "a request never ended"
            await until(lambda: not router._beside)
            for pool in router._fleet._pools.values():
                pool.desk.check()
            for server in router._fleet.servers.values():
                assert not server.running
    finally:
        for server in (*prefill, *decode, *mixed):
            await server.stop()


def test_a_prompt_is_computed_here_and_answered_there() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            passed = asked(
                stream_options={"include_usage": True}, min_tokens=4, stop=["x"], vendor={"a": [1.50]}
            )
            assert (await ask(router, passed)).startswith(WHOLE)
            (first,), (then,) = one.legs, other.legs
            own = json.loads(passed.body)
            assert first["prompt"] == own["prompt"] and first["vendor"] == {"a": [1.5]} and first["ignore_eos"]
            assert not first.keys() & {"min_tokens", "stop"}
            assert then.pop("kv_transfer_params")["remote_engine_id"] == one.url
            assert then == own and other.bodies[-1].endswith(passed.body[1:]), "bytes were changed"
            assert (kept.used, kept.wrong, kept.held) == (["kept-0"], [], {})
            whole = await ask(router, asked("other " + LONG, stream=False))
            assert json.loads(whole)["vendor"] == 1 and len(one.legs) == 2
            assert (await ask(router, asked("a third " + LONG, temperature=0))).startswith(WHOLE)
            assert other.legs[-1]["return_token_ids"], "another server might have to go on"
            assert "return_token_ids" not in one.legs[-1] and kept.used[-1] == "kept-2"
            roles = {each["server"]: (each["role"], each["requests_total"]) for each in router.status()}
            assert roles == {one.url: ("prefill", 3), other.url: ("decode", 3)}
            assert all("(Nixl)" in line for line in router.lines())

    run(test)


def test_short_and_cached_prompts_stay_where_they_are_answered() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            for number in range(4):
                assert (await ask(router, asked(f"{number} {SHORT}"))).startswith(WHOLE)
            assert not one.legs and not other.legs
            for more in ("", " and", " and so on"):
                assert (await ask(router, asked(LONG + more))).startswith(WHOLE)
            assert len(one.legs) == 1, "a prompt whose KV was handed over is cached"
            assert len(other.bodies) == 7

    run(test)


def test_without_a_threshold_a_prompt_stays_where_that_costs_less() -> None:
    """A prefill delays the answers of a decode server, a hand-over takes time; what they take is learnt, of a prefill
    server also before it was tried."""
    conductor = Conductor(split.divided(RULES, None))
    prefill, decode = NodeId("p"), NodeId("d")
    conductor.on(NodeJoined(prefill, Role.PREFILL, 1 << 40, 16, cluster="prefill", lends=False), 0)
    conductor.on(NodeJoined(decode, Role.MIXED, 1 << 40, 16, cluster="decode", lends=False), 0)
    times = iter(range(NS_PER_S, 100 * NS_PER_S, NS_PER_S))

    def computed_by(name: str) -> NodeId:
        now = next(times)
        (route,) = conductor.on(RequestArrived(RequestId(name), "", 10_000, 100, ()), now)
        assert isinstance(route, Route) and route.decode == decode
        conductor.on(FirstToken(RequestId(name), route.attempt), now + NS_PER_S // 5)
        conductor.on(PrefillFinished(RequestId(name), route.attempt), now + NS_PER_S // 5)
        return route.prefill

    assert computed_by("first") == decode, "nothing decodes"
    assert computed_by("second") == prefill
    handover = split.HandoverTime()
    slow = [handover.add(NS_PER_S, now * NS_PER_S) for now in range(1, 40)]
    assert slow[-1] is not None and 1.9 * NS_PER_S < slow[-1].links[0].rtt_ns <= 2 * NS_PER_S
    assert handover.add(NS_PER_S, 39 * NS_PER_S) is None
    conductor.on(slow[-1], next(times))
    assert computed_by("third") == decode, "a hand-over takes longer than the delay of two answers"
    conductor.check()


def test_requests_that_one_server_has_to_compute() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            ids = list(range(400))
            for more in ({"n": 2}, {"best_of": 3}, {"prompt": [LONG, LONG]}, {"prompt": [ids]}, {"echo": True}):
                body = json.loads(asked(stream=False).body) | more
                passed = replace(asked(stream=False), body=json.dumps(body).encode())
                assert json.loads(await ask(router, passed))["vendor"] == 1
            passed = replace(asked(stream=False), target="/v1/embeddings")
            assert json.loads(await ask(router, passed))["vendor"] == 1
            get = replace(asked(), method="GET", target="/v1/responses/x", body=b"", is_streamed=False)
            await ask(router, get)
            assert not one.legs and len(other.bodies) == 6 and len(other.asked) == 7
            passed = replace(
                asked(),
                body=json.dumps({"prompt": ids, "model": "m", "stream": True}).encode(),
                prefix=b"7, " * 400,
            )
            assert (await ask(router, passed)).startswith(WHOLE)
            assert len(one.legs) == 1, "a list of tokens is one prompt"

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "prompt": "x", "kv_transfer_params": null}',
        b'{"model": "m", "prompt": "x", "kv_transfer_p\\u0061rams": {"do_remote_prefill": true}}',
        b'{"model": "m", "prompt": "x", "vllm_xargs": {"kv_transfer_params": {}}}',
        b'{"model": "m", "prompt": "x", "bootstrap_room": 7}',
        b'{"model": "m", "prompt": "x", "more": NaN, "kv_transfer_params": {}}',
        '{"kv_transfer_params": {}}'.encode("utf-16"),
        b'[{"kv_transfer_params": {}}]',
        b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_clients_do_not_say_whose_kv_they_take(body: bytes) -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            for target in ("/v1/completions", "/v1/responses", "/v1/messages"):
                with pytest.raises(RequestError, match=r"kv_transfer_params|bootstrap_room|no JSON object"):
                    await router.forward(replace(asked(), target=target, body=body))
            assert not one.bodies and not other.bodies
            form = (("Content-Type", "multipart/form-data; boundary=x"),)
            audio = replace(
                asked(), target="/v1/audio/transcriptions", headers=form, body=b"{}", is_streamed=False
            )
            assert json.loads(await ask(router, audio))["vendor"] == 1

    run(test)


@pytest.mark.parametrize("fault", ["stop", "error", "die", "refuse", "none"])
def test_without_a_prefill_server_the_other_one_computes_alone(fault: str) -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            if fault == "stop":
                await one.stop()
            elif fault == "none":
                one.connector = ""
            else:
                one.fault = fault
            assert (await ask(router, asked())).startswith(WHOLE)
            assert other.bodies and not other.legs and not kept.held
            if fault == "stop":
                await one.start()
            one.fault, one.connector = "", "nixl"
            await until(lambda: router.gauges()["server_up"][one.url] == 1)
            assert (await ask(router, asked("again " + LONG))).startswith(WHOLE)
            assert other.legs and not kept.wrong

    run(test)


def test_a_decode_server_that_is_gone_between_the_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV is released by another one, which takes the request."""
    monkeypatch.setattr(fleet, "PROBE_S", 3600)  # the second leg alone notices

    async def test() -> None:
        kept = Kept()
        one, decodes = FakeHalf(kept), [FakeHalf(kept), FakeHalf(kept)]
        async with routed([one], decodes) as router:
            one.gate.clear()
            passed = asked()
            waiting = asyncio.create_task(router.forward(passed))
            await until(lambda: len(one.legs) == 1)
            route = router._open[passed.request].route
            assert route is not None
            gone, stays = sorted(decodes, key=lambda server: server.url != route.decode)
            await gone.stop()
            one.gate.set()
            assert (await read(await waiting)).startswith(WHOLE)
            await until(lambda: kept.released == ["kept-0"])
            assert not kept.held and not kept.wrong and stays.bodies == [passed.body]
            await gone.start()

    run(test)


def test_what_is_refused_between_the_legs_is_released() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        rules = Rules(policy="isthmus", wait_ms=200, admission="baseline", tbt_ms=1)
        async with routed([one], [other], rules=rules) as router:
            with pytest.raises(OverloadedError):
                await router.forward(replace(asked(), max_tokens=100))
            await until(lambda: kept.released == ["kept-0"])
            assert not kept.used and not kept.wrong

    run(test)


def test_a_client_that_leaves_amid_a_prefill() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            one.gate.clear()
            waiting = asyncio.create_task(router.forward(asked()))
            await until(lambda: len(one.legs) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: one.num_left == 1)
            assert not kept.held and not other.bodies

    run(test)


@pytest.mark.parametrize("fault", ["error", "die"])
def test_a_decode_server_that_fails_gets_no_dictionary_again(fault: str) -> None:
    """Nor is its KV released by another one: it may be reading."""

    async def test() -> None:
        kept = Kept()
        one, ill, well = FakeHalf(kept), FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [ill, well]) as router:
            ill.fault = fault
            for number in range(6):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            assert ill.legs and not kept.wrong and not kept.released
            names = [leg["kv_transfer_params"]["remote_request_id"] for leg in (*ill.legs, *well.legs)]
            assert len(names) == len(set(names)), "a dictionary was sent twice"

    run(test)


def test_mixed_and_separate_servers_together() -> None:
    async def test() -> None:
        kept = Kept()
        one, other, mixed = FakeHalf(kept), FakeHalf(kept), FakeServer()
        async with routed([one], [other], [mixed]) as router:
            for server in (other, mixed):
                server.gate.clear()
            answers = [await router.forward(asked(f"{number} {LONG}")) for number in range(6)]
            for server in (other, mixed):
                server.gate.set()
            for answer in answers:
                assert (await read(answer)).startswith(WHOLE)
            assert other.legs and mixed.bodies and len(one.legs) == len(other.legs)
            await other.stop()
            assert (await ask(router, asked("more " + LONG))).startswith(WHOLE)
            await other.start()

    run(test)


def test_prefill_servers_go_and_come() -> None:
    async def test() -> None:
        kept = Kept()
        one, other = FakeHalf(kept), FakeHalf(kept)
        async with routed([one], [other]) as router:
            one.gate.clear()
            begun = asyncio.create_task(ask(router, asked()))
            await until(lambda: len(one.legs) == 1)
            router.change(add=(), remove=[one.url])
            assert (await ask(router, asked("more " + LONG))).startswith(WHOLE), (
                "computed by the other one alone"
            )
            one.gate.set()
            assert (await begun).startswith(WHOLE) and kept.used == ["kept-0"], "what it had begun went on"
            await until(lambda: [each["server"] for each in router.status()] == [other.url])
            router.change(add=[one.url], remove=())
            await until(lambda: router.gauges()["server_up"].get(one.url) == 1)
            assert (await ask(router, asked("again " + LONG))).startswith(WHOLE)
            assert len(one.legs) == len(other.legs) == 2

    run(test)


def test_killed_servers_cost_no_wrong_token() -> None:
    """Each of four servers ten times while others answer: every request ends once, and no dictionary comes twice."""

    async def test() -> None:
        kept, draws = Kept(), Random(3)
        prefills, decodes = [FakeHalf(kept), FakeHalf(kept)], [FakeHalf(kept), FakeHalf(kept)]
        patient = Rules(policy="isthmus", max_attempts=3, wait_ms=60_000)
        async with routed(prefills, decodes, rules=patient, rejoin_s=60) as router:
            ends: list[bytes] = []

            async def one(number: int) -> None:
                try:
                    ends.append(await ask(router, asked(f"{number} {LONG}", stream=bool(number % 4))))
                except UnavailableError as error:
                    ends.append(f"unavailable: {error}".encode())

            number = 0
            for _ in range(10):
                for server in draws.sample([*prefills, *decodes], 4):
                    server.gate.clear()
                    asking = [asyncio.create_task(one(number + more)) for more in range(4)]
                    number += 4
                    for _ in range(draws.randrange(60)):  # some way into the legs
                        await asyncio.sleep(0)
                    await server.stop()
                    server.gate.set()
                    await server.start()
                    await asyncio.gather(*asking)
            assert len(ends) == number
            whole = [end for end in ends if end.startswith(WHOLE) or b'"vendor"' in end]
            assert len(whole) >= number / 2, "a killed prefill server costs no answer"
            assert all(b"unavailable" in end for end in ends if end not in whole)
        assert not kept.wrong and len(kept.used) == len(set(kept.used)) > 10

    run(test)


def page(body: bytes) -> tuple[str, str, list[bytes]]:
    return "200 OK", "", [body]


def test_mooncake_is_asked_where_its_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        bootstrap = FakeServer()
        engine = b'{"0": {"engine_id": "e-1", "worker_addr": {"0": {"0": "tcp://h:1"}}}}'
        bootstrap.pages["/query"] = page(engine)
        await bootstrap.start()
        monkeypatch.setattr(split, "BOOTSTRAP_PORT", bootstrap.port)
        kept = Kept()
        one, other = FakeHalf(kept, connector="mooncake"), FakeHalf(kept)
        async with routed([one], [other]) as router:
            for number in range(3):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            params = [leg["kv_transfer_params"] for leg in other.legs]
            names = {each.pop("transfer_id") for each in params}
            assert len(names) == 3 and len(kept.used) == 3 and not kept.wrong
            told = {"remote_engine_id": "e-1", "remote_bootstrap_addr": bootstrap.url}
            assert params == [{"do_remote_decode": False, "do_remote_prefill": True, **told}] * 3
        bootstrap.pages["/query"] = page(b'{"0": {"engine_id": "e-1"}, "1": {"engine_id": "e-2"}}')
        async with routed([one], [other]) as router:
            assert router.gauges()["server_up"] == {one.url: 0, other.url: 1}
        await bootstrap.stop()

    run(test)


def test_both_legs_of_sglang_meet_in_a_room() -> None:
    async def test() -> None:
        rooms = Rooms()
        one, other = FakeSglang(rooms, "prefill"), FakeSglang(rooms, "decode")
        async with routed([one], [other]) as router:
            for number in range(3):
                passed = asked(f"{number} {SHORT}", n=2)
                assert (await ask(router, passed)).startswith(WHOLE)
                assert other.bodies[-1].endswith(passed.body[1:]) and one.bodies[-1] == other.bodies[-1]
            legs = {
                role: [room for name, room in rooms.entered if name == role] for role in ("prefill", "decode")
            }
            assert sorted(legs["prefill"]) == sorted(legs["decode"]) and len(set(legs["decode"])) == 3
            told = json.loads(other.bodies[-1])
            assert (told["bootstrap_host"], told["bootstrap_port"]) == ("127.0.0.1", 8765)
            get = replace(asked(), method="GET", target="/v1/responses/x", body=b"", is_streamed=False)
            await ask(router, get)
            assert len(one.asked) == 3 and len(other.asked) == 4

    run(test)


def test_a_prefill_server_of_sglang_that_dies_takes_its_attempt_along() -> None:
    async def test() -> None:
        rooms = Rooms()
        one, well, other = (FakeSglang(rooms, role) for role in ("prefill", "prefill", "decode"))
        async with routed([one, well], [other]) as router:
            one.fault = "die"
            for number in range(4):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            assert router.gauges()["server_failures_total"][one.url] > 0

    run(test)


def test_a_server_of_the_other_role_is_not_used() -> None:
    async def test() -> None:
        rooms = Rooms()
        one, other = FakeSglang(rooms, "decode"), FakeSglang(rooms, "decode")
        async with routed([one], [other]) as router:
            assert router.gauges()["server_up"] == {one.url: 0, other.url: 1}

    run(test)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name not in (split.PARAMS, *split.ROOM)), VALUES, max_size=6),
       st.sampled_from([None, 1]), st.sampled_from(["", " \n"]))  # fmt: skip
def test_fields_are_put_before_others(own: dict[str, Any], indent: int | None, space: str) -> None:
    body = (space + json.dumps(own, indent=indent)).encode()
    passed: PassedRequest = replace(asked(), body=body)
    leg = split.decode_leg(passed, b'{"a":1}')
    assert json.loads(leg.body) == {split.PARAMS: {"a": 1}} | own
    assert leg.body.endswith(body.lstrip()[1:])
