"""Servers of other makers behind the router, as they answered it: what is taken from them, and what passes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import StartError, TimedOutError, UnknownModelError
from isthmus.live.cluster.recorder import Recorder, RecordingHeader
from isthmus.live.gateway.status import RouterStatus
from isthmus.live.servers import fleet
from isthmus.live.servers.router import Router

from .plain_fake import WHOLE, FakeServer, event
from .test_router import LONG, RULES, ask, asked, read, routed, run, until

JSON = "Content-Type: application/json\r\n"
EVENTS = "Content-Type: text/event-stream\r\n"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PROBE_S", 0.05)
    monkeypatch.setattr(fleet, "SILENCE_S", 60)


def listed(*models: dict[str, object]) -> tuple[str, str, list[bytes]]:
    return "200 OK", JSON, [json.dumps({"object": "list", "data": models}).encode()]


def page(status: str, content: object) -> tuple[str, str, list[bytes]]:
    return status, JSON, [json.dumps(content).encode()]


LOADING = page(
    "503 Service Unavailable", {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
)


@contextlib.asynccontextmanager
async def started(*servers: FakeServer) -> AsyncIterator[None]:
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.stop()


def test_a_server_that_is_loading_is_used_once_it_is_ready() -> None:
    """SGLang lists its models while it warms up; llama.cpp answers 503 to everything."""

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        one.pages["/health"] = LOADING
        async with routed(one, other) as router:
            assert router.gauges()["server_up"] == {one.url: 0, other.url: 1}
            for number in range(6):
                assert (await ask(router, asked(f"{number} {LONG}"))).startswith(WHOLE)
            assert len(other.bodies) == 6 and not one.bodies
            del one.pages["/health"]
            await until(lambda: router.gauges()["server_up"][one.url] == 1)

    run(test)


def test_a_server_that_says_it_is_not_ready_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's `/health` is 503 when its engine is dead."""
    monkeypatch.setattr(fleet, "SILENCE_S", 0.1)

    async def test() -> None:
        one, other = FakeServer(), FakeServer()
        async with routed(one, other) as router:
            one.pages["/health"] = page("503 Service Unavailable", "")
            await until(lambda: router.gauges()["server_up"][one.url] == 0)

    run(test)


def test_only_servers_that_load_is_one_line() -> None:
    async def test() -> None:
        server = FakeServer()
        server.pages["/health"] = LOADING
        async with started(server):
            with pytest.raises(StartError, match=r"it says that it is not ready \(HTTP 503 of /health\)"):
                async with Router(RULES, [server.url], rejoin_s=0.2).run():
                    pass

    run(test)


TOO_LONG = {
    "vllm": {"error": {"message": "This model's maximum context length is 64 tokens. However, ...", "code": 400}},
    "sglang": {"object": "error", "message": "The input (99 tokens) is longer than the model's context length"},
    "llama.cpp": {"error": {"message": "the request exceeds the available context size", "code": 400}},
}  # fmt: skip


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_request_too_long_for_one_server_goes_to_one_that_takes_longer_ones(kind: str) -> None:
    async def test() -> None:
        short, long = FakeServer(), FakeServer()
        short.pages["/v1/models"] = listed({"id": "m", "max_model_len": 1000})
        long.pages["/v1/models"] = listed({"id": "m", "max_model_len": 4000})
        short.pages["/v1/completions?a=%20b"] = page("400 Bad Request", TOO_LONG[kind])
        async with routed(short, long) as router:
            long.gate.clear()
            busy = [await router.forward(asked(f"{number} {LONG}")) for number in range(3)]
            answer = asyncio.create_task(router.forward(asked()))
            await until(lambda: len(short.bodies) >= 1 and len(long.bodies) == 4)
            long.gate.set()
            assert (await read(await answer)).startswith(WHOLE)
            for each in busy:
                assert (await read(each)).startswith(WHOLE)
            # It looks too long for the shorter one, and is not tried there.
            num_asked = len(short.bodies)
            assert (await ask(router, asked("a word " * 1000))).startswith(WHOLE)
            assert len(short.bodies) == num_asked
            long.pages["/v1/completions?a=%20b"] = short.pages["/v1/completions?a=%20b"]
            last = await router.forward(asked("b word " * 1000))
            assert last.status == 400 and json.loads(await read(last)) == TOO_LONG[kind]

    run(test)


def test_the_time_allowed_bounds_servers_of_all_lengths_together() -> None:
    async def test() -> None:
        short, long = FakeServer(), FakeServer()
        short.pages["/v1/models"] = listed({"id": "m", "max_model_len": 1000})
        long.pages["/v1/models"] = listed({"id": "m", "max_model_len": 4000})
        short.pages["/v1/completions?a=%20b"] = page("400 Bad Request", TOO_LONG["vllm"])
        async with routed(short, long, timeout_s=60) as router:
            router._timeout_s = 0.5
            long.fault = "mute"
            with pytest.raises(TimedOutError):
                await router.forward(asked())
            assert short.bodies and long.bodies

    run(test)


def test_another_refusal_is_not_tried_again() -> None:
    async def test() -> None:
        short, long = FakeServer(), FakeServer()
        short.pages["/v1/models"] = listed({"id": "m", "max_model_len": 1000})
        long.pages["/v1/models"] = listed({"id": "m", "max_model_len": 4000})
        for server in (short, long):
            server.pages["/v1/completions?a=%20b"] = page(
                "400 Bad Request", {"error": {"message": "temperature"}}
            )
        async with routed(short, long) as router:
            answer = await router.forward(asked())
            assert answer.status == 400 and b"temperature" in await read(answer)
            assert len(short.bodies) + len(long.bodies) == 1

    run(test)


def test_servers_with_a_model_in_common_share_its_requests() -> None:
    """Ollama's servers list what was pulled there, vLLM's the adapters that were loaded there."""

    async def test() -> None:
        one, other = FakeServer("a", "b"), FakeServer("b")
        async with routed(one, other) as router:
            for server in (one, other):
                server.gate.clear()
            answers = [await router.forward(asked(f"{number} {LONG}", model="b")) for number in range(6)]
            assert len(one.bodies) == len(other.bodies) == 3
            for server in (one, other):
                server.gate.set()
            for answer in answers:
                assert (await read(answer)).startswith(WHOLE)
            homes = {number: any(f'"{number} ' in body.decode() for body in one.bodies) for number in range(6)}
            for number, is_one in homes.items():
                num_before = len(one.bodies)
                await ask(router, asked(f"{number} {LONG} and more", model="b"))
                assert (len(one.bodies) > num_before) == is_one, "its prompt is cached at the other"
            with pytest.raises(UnknownModelError, match="'c' does not exist; there are a, b"):
                await router.forward(asked(model="c"))

    run(test)


def test_other_names_of_a_model_are_served() -> None:
    async def test() -> None:
        one, other = FakeServer(), FakeServer("other")
        one.pages["/v1/models"] = listed({"id": "smol", "aliases": ["small"], "owned_by": "llamacpp"})
        async with routed(one, other) as router:
            assert (await ask(router, asked(model="small"))).startswith(WHOLE)
            assert len(one.bodies) == 1 and [each["id"] for each in router.models()] == ["smol", "other"]

    run(test)


def sglang() -> FakeServer:
    server = FakeServer()
    server.pages["/v1/models"] = listed({"id": "m", "owned_by": "sglang", "max_model_len": 32768})
    server.pages["/get_server_info"] = page(
        "200 OK", {"version": "0.5.6", "max_total_num_tokens": 4096, "page_size": 1}
    )
    server.pages["/metrics"] = page("404 Not Found", {"detail": "Not Found"})
    return server


def test_sglang_s_own_endpoint_passes_and_its_cached_tokens_are_read() -> None:
    async def test() -> None:
        server = sglang()
        meta = {
            "id": "a",
            "finish_reason": None,
            "prompt_tokens": 40,
            "cached_tokens": 24,
            "completion_tokens": 2,
        }
        chunks = [
            event({"text": " one", "meta_info": meta}),
            event({"text": " one two", "meta_info": meta}),
            b"data: [DONE]\n\n",
        ]
        server.pages["/generate"] = ("200 OK", EVENTS, chunks)
        async with routed(server) as router:
            body = json.dumps({"text": LONG, "stream": True, "sampling_params": {"max_new_tokens": 2}}).encode()
            passed = msgspec.structs.replace(asked(), target="/generate", body=body, model="")
            assert await ask(router, passed) == b"".join(chunks) and server.bodies == [body]
            (status,) = msgspec.convert({"servers": router.status()}, RouterStatus).servers
            assert (status.kind, status.version, status.longest) == ("sglang", "0.5.6", 32768)
            assert (status.kv_tokens, status.cache_from) == (4096, "told")
            assert (status.cached_tokens_total, status.cache_told_tokens_total) == (24, 40)

    run(test)


def test_sglang_is_not_made_to_compute_for_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `/health` answers once a token is computed, behind whatever prompts are before it."""
    monkeypatch.setattr(fleet, "SILENCE_S", 0.3)

    async def test() -> None:
        server = sglang()
        async with routed(server) as router:
            (known,) = router._fleet.servers.values()
            heard_s = known.heard_s
            server.pages["/health"] = LOADING
            await until(lambda: known.heard_s > heard_s + 0.5)
            assert router.healthy

    run(test)


OLLAMA_END = {"model": "m", "done": True, "done_reason": "stop", "prompt_eval_count": 11, "eval_count": 5}
LLAMA_END = {
    "content": "",
    "stop": True,
    "tokens_predicted": 7,
    "tokens_evaluated": 11,
    "timings": {"predicted_n": 9},
}


@pytest.mark.parametrize(
    ("path", "end", "length"), [("/api/chat", OLLAMA_END, 5), ("/completion", LLAMA_END, 7)]
)
def test_answers_of_other_forms_pass_and_their_length_is_read(
    path: str, end: dict[str, object], length: int, tmp_path: Path
) -> None:
    """Ollama streams lines of JSON, llama.cpp's own endpoint has words of its own."""
    file = tmp_path / "flight.jsonl"

    async def test() -> None:
        server = FakeServer()
        lines = [json.dumps(each).encode() + b"\n" for each in ({"message": {"content": "one"}}, end)]
        server.pages[path] = ("200 OK", "Content-Type: application/x-ndjson\r\n", lines)

        def new_recorder(number: int) -> Recorder:
            return Recorder(file, RecordingHeader(RECORDING_FORMAT, RULES))

        async with (
            started(server),
            (router := Router(RULES, [server.url], rejoin_s=0.2, new_recorder=new_recorder)).run(),
        ):
            passed = msgspec.structs.replace(asked(), target=path)
            assert await ask(router, passed) == b"".join(lines)

    run(test)
    events = [json.loads(line)["event"] for line in file.read_bytes().splitlines()[1:]]
    assert [each["num_generated"] for each in events if each["type"] == "RequestEnded"] == [length]


@pytest.mark.parametrize(("key", "shown"), [("own", "Bearer own"), (None, "Bearer none")])
def test_a_server_is_shown_one_key(key: str | None, shown: str) -> None:
    """OpenAI's clients always send one, and servers read the first of two."""

    async def test() -> None:
        server = FakeServer()
        async with started(server), (router := Router(RULES, [server.url], rejoin_s=0.2, key=key)).run():
            passed = msgspec.structs.replace(
                asked(), headers=(("authorization", "Bearer none"), ("x-own", "1"))
            )
            assert (await ask(router, passed)).startswith(WHOLE)
            ((_, _, headers, _),) = server.asked
            assert [text for name, text in headers.items() if name.lower() == "authorization"] == [shown]
            assert headers["x-own"] == "1"

    run(test)


def test_a_server_that_does_not_tell_what_was_cached_has_no_share() -> None:
    """vLLM without `--enable-prompt-tokens-details`: nothing told is not nothing cached."""

    async def test() -> None:
        server = FakeServer()
        usage = {"prompt_tokens": 40, "completion_tokens": 4, "prompt_tokens_details": None}
        server.pages["/v1/completions?a=%20b"] = page("200 OK", {"choices": [], "usage": usage})
        async with routed(server) as router:
            await ask(router, asked(stream=False))
            (status,) = msgspec.convert({"servers": router.status()}, RouterStatus).servers
            assert (status.prompt_tokens_total, status.cache_told_tokens_total) == (40, 0)

    run(test)


def test_prompts_shorter_than_a_block_of_the_server_teach_nothing() -> None:
    """vLLM caches 128 tokens at once on CPUs: prompts of 100 tokens are never cached, however large the cache is."""

    async def test() -> None:
        server = FakeServer(metrics='vllm:cache_config_info{block_size="128",num_gpu_blocks="64"} 1.0\n')
        usage = {"prompt_tokens": 100, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}
        server.pages["/v1/completions?a=%20b"] = page("200 OK", {"choices": [], "usage": usage})
        async with routed(server) as router:
            for _ in range(4):
                await ask(router, asked(stream=False))
            assert router.gauges()["server_cache_capacity_blocks"] == {server.url: 512}
            usage |= {"prompt_tokens": 4000}
            server.pages["/v1/completions?a=%20b"] = page("200 OK", {"choices": [], "usage": usage})
            await ask(router, asked(stream=False))
            assert router.gauges()["server_cache_capacity_blocks"] == {server.url: 480}
            (status,) = msgspec.convert({"servers": router.status()}, RouterStatus).servers
            assert status.cache_from == "learnt"

    run(test)
