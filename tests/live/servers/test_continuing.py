"""Answers that break off amid their stream and go on at another server: the client gets what one server alone says."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.conductor import Rules
from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.servers import fleet
from isthmus.live.servers.continuing import answer_to
from isthmus.live.servers.router import CUT_EVENT, Router

from .plain_fake import FakeServer
from .test_router import RULES, _soon, read, routed, run, until  # noqa: F401
from .token_fake import SAID, TokenServer, ids_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUMBERS = count(1)


def asked(target: str, **more: Any) -> PassedRequest:
    said = (
        {"prompt": "a — prompt>"} if target == COMPLETIONS else {"messages": [{"role": "user", "content": "é"}]}
    )
    body = {"model": "m", **said, "stream": True, "temperature": 0, "max_tokens": 200}
    body |= {"stream_options": {"include_usage": True}} | more
    body = {name: value for name, value in body.items() if value != "absent"}
    headers = (("content-type", "application/json"), ("Accept-Encoding", "gzip"))
    return PassedRequest(
        RequestId(f"c{next(NUMBERS)}"), "POST", target, headers, json.dumps(body).encode(), "m",
        json.dumps(said).encode(), is_streamed=True,
    )  # fmt: skip


def events(stream: bytes) -> list[Any]:
    lines = stream.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line[6:]) for line in lines[:-2]]


def text_of(found: list[Any]) -> str:
    choices = [choice for event in found for choice in event["choices"]]
    return "".join(
        [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    )


def ends_of(found: list[Any]) -> list[str]:
    choices = [choice for event in found for choice in event["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


def tokens_of(found: list[Any]) -> list[int]:
    return [token for event in found for choice in event["choices"] for token in choice.get("token_ids") or ()]


def alone(server: TokenServer, passed: PassedRequest) -> bytes:
    """What the server sends to a client that asks it itself."""
    return b"".join(server.stream(passed.target, json.loads(passed.body)))


async def through(router: Router, passed: PassedRequest) -> bytes:
    return await read(await router.forward(passed))


def check_same(got: bytes, whole: bytes) -> None:
    """The text, the end and the counts are those of an undisturbed answer, and each event has its form."""
    found, expected = events(got), events(whole)
    assert text_of(found) == text_of(expected)
    assert tokens_of(found) == tokens_of(expected)
    assert ends_of(found) == ends_of(expected) and len(ends_of(found)) == 1
    assert [event["usage"] for event in found if event.get("usage")] == [
        event["usage"] for event in expected if event.get("usage")
    ]
    assert len({(event["id"], event["created"]) for event in found}) == 1, "two answers in one"
    assert forms(found) == forms(expected)


def forms(found: list[Any]) -> set[str]:
    """Keys of events and their order, with those of choices and deltas."""
    shapes = set()
    for event in found:
        for choice in event["choices"] or [{}]:
            delta = "".join(choice.get("delta", {})) if not choice.get("finish_reason") else ""
            shapes.add(f"{list(event)} {list(choice)} {delta}")
    return shapes


STOPS = {
    "plain": {},
    "limit": {"max_tokens": 31},
    "stop": {"stop": ["not said", " and"]},
    "shown": {"stop": ["\n\nna"], "include_stop_str_in_output": True},
    "never": {"stop": ["said never", "x"]},
    "ids": {"return_token_ids": True},
    "penalty": {"presence_penalty": 0.5},
    "seed": {"temperature": 0.7, "seed": 5},
}


@pytest.mark.parametrize("fields", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("target", [CHAT, COMPLETIONS], ids=["chat", "completions"])
@pytest.mark.parametrize("kind", ["vllm", "isthmus"])
def test_an_answer_cut_anywhere_is_whole(kind: str, target: str, fields: dict[str, Any]) -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer(kind, cuts), TokenServer(kind, cuts)
        async with routed(one, other) as router:
            whole = alone(one, asked(target, **fields))
            told = b"".join(
                one.stream(target, json.loads(asked(target, **fields).body) | {"return_token_ids": True})
            )
            uncut = await through(router, asked(target, **fields))
            assert uncut.replace(str(other.port).encode(), str(one.port).encode()) == whole
            at, places = 0, list[int]()
            for event in told.split(b"\n\n")[:-1]:
                places += [at + 1, at + len(event) // 2, at + len(event) + 1, at + len(event) + 2]
                at += len(event) + 2
            for place in places[:-2]:  # the last two are behind the end
                cuts[:] = [place]
                check_same(await through(router, asked(target, **fields)), whole)
                assert not cuts

    run(test)


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("kind", ["vllm", "isthmus"])
def test_events_of_several_tokens_join(kind: str, batch: int) -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        async with routed(TokenServer(kind, cuts, batch=batch), TokenServer(kind, cuts, batch=batch)) as router:
            for fields in ({}, {"stop": ["not said", " and"]}):
                whole = alone(TokenServer(kind, [], batch=batch), asked(COMPLETIONS, **fields))
                for place in range(150, 2 * len(whole), 151):
                    cuts[:] = [place]
                    check_same(await through(router, asked(COMPLETIONS, **fields)), whole)

    run(test)


def bodies(server: TokenServer) -> list[dict[str, Any]]:
    return [json.loads(body) for body in server.bodies]


def test_a_continuation_computes_little_again() -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer("vllm", cuts), TokenServer("vllm", cuts)
        async with routed(one, other) as router:
            for fields, most in (({}, 5), ({"stop": ["never said"]}, 24)):
                one.asked.clear()
                other.asked.clear()
                told = asked(CHAT, **fields, return_token_ids=True)
                sent = alone(one, told)
                sent = sent[: len(sent) * 3 // 4]
                num_sent = len(tokens_of([json.loads(each[6:]) for each in sent.split(b"\n\n")[:-1]]))
                cuts[:] = [len(sent)]
                check_same(await through(router, told), alone(one, told))
                (again,) = [each for each in bodies(one) + bodies(other) if "prompt" in each]
                num_before = 200 - again["max_tokens"]
                assert again["prompt"] == [*ids_of("<user>é<bot>"), *ids_of(SAID)[:num_before]]
                assert num_sent - most <= num_before < num_sent

    run(test)


def test_a_continuation_that_breaks_off_goes_on_as_well() -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer("isthmus", cuts), TokenServer("isthmus", cuts)
        async with routed(one, other) as router:
            whole = alone(one, asked(CHAT))
            for place in (10, 700, 2500, 5000):
                cuts[:] = [place, place]
                check_same(await through(router, asked(CHAT)), whole)
            assert sum(router.gauges()["server_continued_total"].values()) == 8
            cuts[:] = [3000, 3000, 3000]  # more than the conductor's rules allow
            got = await through(router, asked(CHAT))
            assert got.endswith(CUT_EVENT)
            said = text_of(
                [json.loads(each[6:]) for each in got[: -len(CUT_EVENT)].decode().split("\n\n") if each]
            )
            assert said and SAID.startswith(said), "what was sent stays"

    run(test)


def test_a_server_that_tells_of_its_end_is_one_that_broke_off() -> None:
    """vLLM's engine may die and leave its server; a server that ends in good order closes the stream before its end."""

    class Ending(TokenServer):
        def stream(self, target: str, asked: dict[str, Any]) -> Any:
            for at, event in enumerate(super().stream(target, asked)):
                if at == 9 and self.cuts:
                    if self.cuts.pop(0):
                        yield b'data: {"error":{"message":"dead","type":"InternalServerError","code":500}}\n\n'
                        yield b"data: [DONE]\n\n"
                    return
                yield event

    async def test() -> None:
        cuts: list[int | None] = []
        one, other = Ending("vllm", cuts), Ending("vllm", cuts)
        async with routed(one, other) as router:
            whole = alone(one, asked(COMPLETIONS))
            for end in (1, 0):
                cuts[:] = [None, end]
                check_same(await through(router, asked(COMPLETIONS)), whole)

    run(test)


def test_another_answer_is_not_sent_as_the_rest() -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer("vllm", cuts), TokenServer("vllm", cuts)
        async with routed(one, other) as router:
            for target, fields in ((COMPLETIONS, {}), (CHAT, {"seed": 1, "temperature": 1})):
                for said, most in (("x" * 80, 0), ("O", 0), (SAID, 3)):
                    one.said = other.said = SAID
                    one.most = other.most = 0
                    cuts[:] = [6000]
                    answer = await router.forward(asked(target, **fields, stop=["never said"]))
                    one.said = other.said = said
                    one.most = other.most = most
                    got = await read(answer)
                    assert got.endswith(CUT_EVENT), got[-200:]
                    assert got.count(b"data: ") > 20 and b'"stop"' not in got and b'"length"' not in got

    run(test)


REFUSED = {
    "sampled": {"temperature": 0.7},
    "by default": {"temperature": "absent"},
    "two": {"n": 2},
    "tools": {"tools": [{"type": "function"}]},
    "logprobs": {"logprobs": True},
    "unknown": {"vendor_field": 1},
    "no ids": {"return_token_ids": False},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_passes_as_it_came(fields: dict[str, Any]) -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        server = TokenServer("vllm", cuts)
        async with routed(server) as router:
            passed = asked(CHAT, **fields)
            assert await through(router, passed) == alone(server, passed)
            assert server.bodies == [passed.body]
            cuts[:] = [2000]
            got = await through(router, asked(CHAT, **fields))
            assert got == alone(server, passed)[:2000] + CUT_EVENT

    run(test)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_servers_that_tell_no_ids_stream_untouched(end: bytes) -> None:
    """Of a kind that is not known, or of a version that knows no ids; lines end as they like."""

    class Old(TokenServer):
        def stream(self, target: str, asked: dict[str, Any]) -> Any:
            asked = asked | {"return_token_ids": None}
            for event in super().stream(target, asked):
                yield b": a comment" + end + event.replace(b"\n\n", end)

    async def test() -> None:
        cuts: list[int | None] = []
        server = Old("vllm", cuts)
        async with routed(server) as router:
            whole = alone(server, asked(CHAT))
            assert await through(router, asked(CHAT)) == whole
            assert bodies(server)[-1].pop("return_token_ids")
            cuts[:] = [1999]
            assert await through(router, asked(CHAT)) == whole[:1999] + CUT_EVENT
        other = FakeServer(metrics="")
        async with routed(other) as router:
            passed = asked(CHAT)
            await through(router, passed)
            assert other.bodies == [passed.body]

    run(test)


def test_a_picture_is_more_than_its_tokens() -> None:
    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer("vllm", cuts), TokenServer("vllm", cuts)
        parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:"}}]
        messages = [{"role": "user", "content": parts}, {"role": "user", "content": "é"}]
        async with routed(one, other) as router:
            whole = alone(one, asked(CHAT, messages=messages))
            cuts[:] = [4000]
            check_same(await through(router, asked(CHAT, messages=messages)), whole)
            assert all(each["messages"] == messages for each in bodies(one) + bodies(other))

    run(test)


def test_a_client_that_leaves_while_its_answer_goes_on_takes_it_along() -> None:
    async def test() -> None:
        cuts: list[int | None] = [2000]
        one, other = TokenServer("vllm", cuts), TokenServer("vllm", cuts)
        async with routed(one, other) as router:
            chunks = (await router.forward(asked(CHAT))).chunks()
            await anext(chunks)
            one.fault = other.fault = "mute"
            reading = asyncio.create_task(drained(chunks))
            await until(lambda: len(one.bodies) + len(other.bodies) == 2)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await chunks.aclose()
            await until(lambda: one.num_left + other.num_left > 0)
            assert set(router.gauges()["server_requests_running"].values()) == {0}
            one.fault = other.fault = ""

    run(test)


async def drained(chunks: Any) -> None:
    async for _ in chunks:
        pass


def test_a_server_that_hangs_amid_an_answer_is_left_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SILENCE_S", 0.3)

    async def test() -> None:
        cuts: list[int | None] = []
        one, other = TokenServer("isthmus", cuts), TokenServer("isthmus", cuts)
        patient = Rules(policy="isthmus", wait_ms=60_000)
        async with routed(one, other, rules=patient, rejoin_s=60) as router:
            whole = alone(one, asked(CHAT))
            one.gate.clear()
            other.gate.clear()
            answer = await router.forward(asked(CHAT))
            first = one if one.bodies else other
            first.fault = "hang"
            (other if first is one else one).gate.set()
            check_same(await read(answer), whole)
            first.gate.set()
            first.fault = ""

    run(test)


CHARACTERS = [char.encode() for char in "ab é—😀"]
BYTES = [bytes([byte]) for byte in "é—😀".encode() + b"\xff"]
SAYINGS = st.lists(st.sampled_from(CHARACTERS + BYTES), min_size=4, max_size=40).map(b"".join)


@pytest.mark.parametrize("kind", ["vllm", "isthmus"])
@given(SAYINGS, st.integers(1, 3), st.sampled_from([[], ["ab"], ["a b", "— b"]]), st.floats(0, 1))
def test_whatever_a_model_says_joins(kind: str, said: bytes, batch: int, stops: list[str], at: float) -> None:
    """Bytes that are no characters too."""
    server = TokenServer(kind, [], batch=batch, said=said)
    passed = asked(COMPLETIONS, stop=stops)
    answer = answer_to(passed)
    assert answer is not None

    def attempt() -> list[bytes]:
        request = answer.request_to(kind)
        assert request is not None
        return list(server.stream(request.target, json.loads(request.body)))

    first = attempt()
    got = b"".join(map(answer.take, first[: round(at * (len(first) - 1))]))
    got += b"".join(map(answer.take, attempt()))
    assert answer.error is None
    expected = alone(server, passed)
    assert text_of(events(got)) == text_of(events(expected))


@pytest.mark.parametrize("second", [900, 1500])
def test_an_answer_that_breaks_off_before_its_first_text_begins_anew(second: int) -> None:
    """The first event has a part of a character: a token, and no text."""

    async def test() -> None:
        said, cuts = "😀😀 of the sea and the ships on it", list[int | None]()
        one, other = (TokenServer("isthmus", cuts, said=said) for _ in range(2))
        async with routed(one, other) as router:
            passed = asked(COMPLETIONS)
            told = b"".join(one.stream(COMPLETIONS, json.loads(passed.body) | {"return_token_ids": True}))
            cuts[:] = [told.index(b"\n\n") + 2, second]
            check_same(await through(router, passed), alone(one, passed))
            assert not cuts

    run(test)


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
def test_tokens_are_counted_where_no_usage_is_told(kind: str) -> None:
    async def test() -> None:
        async with routed(TokenServer(kind, [])) as router:
            answer = await router.forward(asked(COMPLETIONS, stream_options="absent"))
            found = await read(answer)
            assert b'"usage"' not in found
            assert answer.num_tokens[1] == found.count(b"data: ") - 1 > 10

    run(test)
