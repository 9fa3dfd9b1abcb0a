"""The fake servers behind which routers are compared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from benchmarks.paced_server import Blocks, Pace, listen, named, rendered

QUICK = Pace(token_ms=0.0, prefill_us=0.0)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "a" * 64 + "b" * 64 + "c" * 16
"""Two full blocks and four tokens more."""


@asynccontextmanager
async def served(pace: Pace = QUICK) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    server = await listen(pace, 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with aiohttp.ClientSession() as session:
        yield session, url
    server.close()


def on_server(check: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with served() as (session, url):
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
    assert named(list(range(33)))[:1] == named(list(range(16)))


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
        assert [await cached(session, url, list(range(40))) for _ in range(2)] == [0, 32]
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
