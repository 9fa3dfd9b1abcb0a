"""The fake servers behind which routers are compared, and the loads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks import route, route_faults, route_loads
from benchmarks.paced import Blocks, Pace, answer_to, named, rendered, tokens_of
from benchmarks.paced_server import listening
from benchmarks.route_client import Client, Reply
from benchmarks.route_faults import Faults, Killable, faults, killable
from benchmarks.route_loads import Conversations, Exact, InTurn
from isthmus.bench import BenchError
from tests.benchmarks.conftest import Study, program

QUICK = Pace(token_ms=0.0, prefill_us=0.0)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "a" * 64 + "b" * 64 + "c" * 16
"""Two full blocks and four tokens more."""


def on_server(check: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with listening(QUICK) as url, aiohttp.ClientSession() as session:
            await check(session, url)

    asyncio.run(run())


async def post(session: aiohttp.ClientSession, url: str, **fields: Any) -> Any:
    async with session.post(url, json=fields) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def cached(session: aiohttp.ClientSession, url: str, prompt: Any) -> int:
    answer = await post(session, url + COMPLETIONS, prompt=prompt, max_tokens=1)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_least_recently_used_block_goes_first() -> None:
    blocks = Blocks(3)
    blocks.use([1, 2, 3])
    assert (blocks.matched([1, 2, 3, 4]), blocks.matched([2, 9]), blocks.matched([9])) == (3, 1, 0)
    blocks.use([1])
    blocks.use([4])
    assert (len(blocks), blocks.matched([1, 2, 3])) == (3, 2), "of one prompt the end goes first"
    blocks.use([5, 6])
    assert (blocks.matched([5, 6]), blocks.matched([4]), blocks.matched([1])) == (2, 1, 0)


def test_a_block_is_named_by_all_before_it() -> None:
    one, other = named("a" * 64 + "c" * 64), named("b" * 64 + "c" * 64 + "d" * 63)
    assert len(one) == len(other) == 2 and one[1] != other[1]


def test_a_chat_begins_with_its_earlier_turns() -> None:
    chat = [{"role": "user", "content": "hi"}]
    more = [*chat, {"role": "assistant", "content": " yes"}, {"role": "user", "content": [{"text": "and"}]}]
    assert rendered(more).startswith(rendered(chat) + " yes")


def test_usage_tells_of_cached_tokens() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        fields = {"prompt": LONG, "max_tokens": 2}
        usage = [(await post(session, url + COMPLETIONS, **fields))["usage"] for _ in range(2)]
        assert [each["prompt_tokens_details"]["cached_tokens"] for each in usage] == [0, 32]
        assert (usage[1]["prompt_tokens"], usage[1]["completion_tokens"]) == (36, 2)
        assert await cached(session, url, LONG[:128]) == 16, "the last token is always computed"
        await post(session, f"{url}/reset_prefix_cache")
        assert await cached(session, url, LONG) == 0
        assert [await cached(session, url, tokens_of("d" * 160)) for _ in range(2)] == [0, 32]
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        assert 'prefix_cache_hits_total{engine="0",model_name="paced"} 80\n' in text
        assert (
            'num_gpu_blocks="384"' in text and 'num_requests_running{engine="0",model_name="paced"} 0' in text
        )

    on_server(check)


def test_a_stream_has_a_word_for_each_token_and_its_usage() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        whole = (await post(session, url + CHAT, **chat))["choices"][0]["message"]["content"]
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post(url + CHAT, json=chat) as answer:
            events = [line[6:] async for line in answer.content if line.startswith(b"data: ")]
        parts = [json.loads(each) for each in events[:-1]]
        assert events[-1].strip() == b"[DONE]"
        said = [each["choices"][0]["delta"]["content"] for each in parts[:-1]]
        assert said[0] == "" and "".join(said) == whole and len(said) == 4
        assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 3

    on_server(check)


def test_faults_come_in_their_order_and_end() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        await post(session, f"{url}/fault", fail=1, status=503, hang=1, cut=1, after=2)
        fields = {"prompt": LONG, "max_tokens": 5, "stream": True}
        async with session.post(url + COMPLETIONS, json=fields) as answer:
            assert answer.status == 503
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.post(url + COMPLETIONS, json=fields), 0.05)
        async with session.post(url + COMPLETIONS, json=fields) as answer:
            lines = []
            with pytest.raises(aiohttp.ClientPayloadError):
                async for line in answer.content:
                    lines.append(line)
        assert sum([line.startswith(b"data: ") for line in lines]) == 2
        assert await cached(session, url, LONG) == 32

    on_server(check)


def test_tokens_are_told() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        chat = [{"role": "user", "content": "a" * 40}]
        tokens = (await post(session, f"{url}{CHAT}/render", messages=chat))["token_ids"]
        assert tokens == (await post(session, f"{url}/tokenize", prompt=rendered(chat)))["tokens"]
        answer = await post(session, url + CHAT, messages=chat, max_tokens=1)
        assert len(tokens) == answer["usage"]["prompt_tokens"] and len(set(tokens[4:10])) == 1

    on_server(check)


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (CHAT, {"messages": [], "model": "other"}, 404),
        (CHAT, {"messages": 1}, 400),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 200_000}, 400),
        ("/fault", {"breaks": 1}, 400),
        ("/render", {}, 404),
    ],
)
def test_refusals(path: str, fields: dict[str, Any], status: int) -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        async with session.post(url + path, json=fields) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["code"] == status

    on_server(check)


# Loads.


def test_conversations_find_their_earlier_turns_where_the_client_knows_the_caches() -> None:
    load = Conversations(num=5, turns=3, systems=2, begin_s=0, think_s=0)

    async def run(is_exact: bool) -> list[Reply]:
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(QUICK)) for _ in range(2)]
            clients = [Client(url, "paced") for url in urls]
            way = Exact(clients, 384) if is_exact else InTurn(clients)
            stack.push_async_callback(way.close)
            return await route_loads.turns(way, load)

    exact, in_turn = asyncio.run(run(True)), asyncio.run(run(False))
    for replies in (exact, in_turn):
        assert len(replies) == 15 and not any(each.error for each in replies)
        assert all(len(each.text) == 4 * load.answer_tokens and each.ttft_s > 0 for each in replies)
    lengths = [sorted(each.prompt_tokens for each in replies) for replies in (exact, in_turn)]
    assert lengths[0] == lengths[1], "all ways ask the same"
    assert sum([each.cached_tokens for each in exact]) > sum([each.cached_tokens for each in in_turn])
    later = sorted(exact, key=lambda each: each.prompt_tokens)[5:]
    assert all(each.cached_tokens >= load.system_tokens for each in later)


def test_a_client_says_what_went_wrong() -> None:
    async def check(session: aiohttp.ClientSession, url: str) -> None:
        chat = [{"role": "user", "content": "hi"}]
        client = Client(url, "paced")
        assert "status 404" in (await Client(url, "other").ask(chat, 2)).error
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = Client(f"http://127.0.0.1:{taken.getsockname()[1]}", "paced")
            assert "refused" in (await nobody.ask(chat, 2)).error.lower()
        await post(session, f"{url}/fault", cut=1, after=1, fail=1)
        assert "status 500" in (await client.ask(chat, 4)).error
        assert "closed" in (await client.ask(chat, 4)).error
        good = await client.ask(chat, 4), await client.ask(chat, 4, stream=False)
        await client.close()
        assert good[0].text == good[1].text and len(good[0].text) == 16 and good[1].prompt_tokens > 0

    on_server(check)


def test_a_failed_answer_in_a_hundred_is_let_pass() -> None:
    good, bad = Reply(), Reply(error="status 500")
    assert len(route_loads.checked([*[good] * 99, bad])) == 99
    for replies in ([*[good] * 98, bad, bad], [], [bad]):
        with pytest.raises(BenchError, match=r"status 500|nothing was asked"):
            route_loads.checked(replies)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [
        (0, 1000, 80, (0, 1)),
        (4000, 1536, 3, (0, 2, 3)),
        (8000, 1600, 9, (0, 2, 3, 4)),
        (8000, 512, 9, (5,)),
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    return file


def test_equal_ids_are_equal_text(trace: Path) -> None:
    rows = route_loads.rows_of(trace, 3, shrink=8, speed=4)
    assert [(row.at_s, len(row.text) // 4, row.max_tokens) for row in rows] == [
        (0, 125, 10),
        (1, 192, 1),
        (2, 200, 1),
    ]
    first, second, third = (row.text for row in rows)
    assert first[:256] == second[:256] and first[256:] != second[256:500] and third.startswith(second)
    assert named(first)[:4] == named(second)[:4] and len(set(named(second))) == 12
    assert 0.4 < route_loads.endless(rows) < 0.5, "4 and 12 of 7 to 12 blocks"


def test_a_trace_and_the_cost_of_a_hop_are_measured(trace: Path) -> None:
    rows = [replace(row, at_s=0.0) for row in route_loads.rows_of(trace, 4, shrink=8, speed=4)]

    async def run() -> tuple[list[Reply], route_loads.Cost]:
        async with AsyncExitStack() as stack:
            way = InTurn([Client(await stack.enter_async_context(listening(QUICK)), "paced")])
            stack.push_async_callback(way.close)
            replies = await route_loads.trace(way, rows)
            return replies, await route_loads.cost(way, 0.01, count().__next__)

    replies, cost = asyncio.run(run())
    assert [len(each.text) // 4 for each in replies] == [10, 1, 1, 1] and replies[2].cached_tokens == 192
    assert min(cost.ttft_1_ms, cost.ttft_8_ms, cost.requests_per_s) > 0
    assert cost.request_cpu_ms and cost.stream_cpu_ms, "a second of processor time for each look"


def test_a_router_that_fails_leaves_the_others(study: Study, tmp_path: Path) -> None:
    peers = ("--peers", "smg,litellm,direct", "--peers-bin", tmp_path)
    program(tmp_path / "smg", "-c 'raise SystemExit(\"no worker\")'")
    options = ("--loads", "turns", "--conversations", 2, "--think-s", 0, "--folder", tmp_path / "logs")
    found, said = study("route", *peers, *options)
    failed, direct = found["rows"]
    assert failed == {"load": "turns", "peer": "smg"} and direct["requests"] == 12 and 0 < direct["rate"] < 1
    assert "2 conversations on 4 servers" in said and "litellm" not in said


def test_a_command_has_the_servers_urls_in_their_place() -> None:
    urls, words = ["http://a", "http://b"], {"port": "1", "second_port": "2", "config": "c"}
    command = [
        part for word in route.PEERS["isthmus"].command.split() for part in route._filled(word, words, urls)
    ]
    assert command[3:] == ["isthmus", "route", "http://a", "http://b", "--port", "1"]
    config = route.PEERS["litellm"].config
    assert config is not None
    assert [each["litellm_params"]["api_base"] for each in config(urls)["model_list"]] == [
        "http://a/v1",
        "http://b/v1",
    ]


def test_a_process_and_its_descendants_are_counted() -> None:
    alone = route.usage(os.getsid(0))
    with subprocess.Popen(["sleep", "60"]) as child:
        both = route.usage(os.getsid(0))
        child.kill()
    assert both[0] >= alone[0] > 0 and both[1] > alone[1] / 2 > 0
    assert route.usage(-1) == (0, 0)


def test_faults_are_counted_and_wrong_text_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No router: all requests go to the first server, which alone is slow and is killed."""
    monkeypatch.setattr(route_faults, "KILLS", 1)
    monkeypatch.setattr(route_faults, "BACK_S", 0.2)
    monkeypatch.setattr(route_faults, "SLOW_S", 0.3)
    monkeypatch.setattr(route_faults, "SLOW_LOAD_S", 0.5)
    monkeypatch.setattr(random.Random, "sample", lambda self, servers, num: servers[:num])

    async def run(servers: list[Killable]) -> Faults:
        client = Client(servers[0].url, "paced")
        return await faults(client, servers, lambda: Client(servers[0].url, "paced"), seed=1)

    with killable(2, ("--token-ms", "2", "--prefill-us", "10", "--blocks", "10000"), tmp_path) as servers:
        found = asyncio.run(run(servers))
    assert found.wrong == 0 and found.whole > 10 and found.cut > 0 == found.told
    assert found.back_s is None, "the second server gets nothing"
    assert (
        found.slow_ttft_ms is not None
        and 0.3 < found.slow_ttft_ms / 1e3 < 60
        and found.left_s < 60
        and found.repeats == 32
    )
    assert [answer_to("a", 3), answer_to("a" + answer_to("a", 1), 2)] == [
        answer_to("a", 1) + (rest := answer_to("a" + answer_to("a", 1), 2)),
        rest,
    ]
