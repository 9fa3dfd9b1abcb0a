"""Answers under way: every way out of a request cancels what still runs, and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from isthmus.core.errors import OverloadedError
from isthmus.core.types import FinishReason
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.wire import finite

from . import folder
from .fake import HANG, FakeBackend, Step, says
from .inprocess import Connection, Poster, events_of


def test_a_submit_that_fails_takes_the_earlier_ones_back(post: Poster, backend: FakeBackend) -> None:
    def script(job: object) -> list[Step]:
        if len(backend.jobs) == 2:
            raise OverloadedError("full", retry_after_s=1)
        return says([97])

    backend.script = script
    assert post.chat(n=3).status_code == 429
    assert sorted(backend.cancelled) == sorted(job.request for job in backend.jobs)


CHAT = {"model": "acme/tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
TIMEOUT_S = 60


def one_token_then(*steps: Step) -> list[Step]:
    return [*says([97], finish=None), *steps]


async def served_until(connection: Connection, condition: Callable[[], bool]) -> None:
    """Serves the request; the client goes away when `condition` holds."""
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        group.create_task(connection.serve())
        while not condition():
            await asyncio.sleep(0)
        connection.disconnect()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [one_token_then(HANG), [HANG]], ids=["after a token", "before any"])
def test_a_client_that_goes_away(
    backend: FakeBackend, tokenizer: GatewayTokenizer, stream: bool, steps: list[Step]
) -> None:
    """No token comes any more, so only the disconnect can end this."""
    backend.script = lambda _: steps
    connection = Connection(create_app(backend, tokenizer), PATH, CHAT | {"stream": stream, "n": 3})
    asyncio.run(served_until(connection, lambda: len(backend.jobs) == 3))
    assert sorted(backend.cancelled) == sorted(job.request for job in backend.jobs)
    assert connection.sent == [] or (stream and len(steps) > 1)


def test_a_client_that_goes_away_while_a_write_waits(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    class SlowConnection(Connection):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            await asyncio.get_running_loop().create_future()

    connection = SlowConnection(create_app(backend, tokenizer), PATH, CHAT | {"stream": True})
    asyncio.run(served_until(connection, lambda: connection.sent != []))
    assert len(backend.cancelled) == 1


def test_a_server_that_says_the_connection_is_closed(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    class ClosedConnection(Connection):
        async def _send(self, message: Any) -> None:
            if message["type"] == "http.response.body":
                raise OSError("closed")

    connection = ClosedConnection(create_app(backend, tokenizer), PATH, CHAT | {"stream": True})
    asyncio.run(connection.serve())
    assert len(backend.cancelled) == 1


def test_shutdown(backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    backend.script = lambda _: one_token_then(HANG)

    async def scenario() -> None:
        connection = Connection(create_app(backend, tokenizer), PATH, CHAT | {"stream": True})
        task = asyncio.ensure_future(connection.serve())
        while not backend.jobs:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))
    assert len(backend.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_cancelled_when_all_goes_well(post: Poster, backend: FakeBackend, stream: bool) -> None:
    assert post.chat(stream=stream, n=3).status_code == 200
    assert backend.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_choice_cancels_the_others(post: Poster, backend: FakeBackend, stream: bool) -> None:
    def script(job: Any) -> list[Step]:
        steps: dict[str, list[Step]] = {
            "0": says([97], FinishReason.LENGTH),
            "1": one_token_then(RuntimeError("bug")),
            "2": one_token_then(HANG),
        }
        return steps[job.request[-1]]

    backend.script = script
    response = post.chat(stream=stream, n=3)
    assert response.status_code == (200 if stream else 500)
    assert "bug" not in response.text
    # Choice 0 had ended by itself. Choice 1 raised, which may leave its request behind.
    assert sorted(request[-1] for request in backend.cancelled) == ["1", "2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cancels_its_choice(post: Poster, backend: FakeBackend, stream: bool) -> None:
    def script(job: Any) -> list[Step]:
        text = "one two" if job.request.endswith("-0") else "one one"
        return [*says(folder.byte_tokens(text), FinishReason.LENGTH if text == "one one" else None), HANG]

    backend.script = script
    response = post.chat(stream=stream, n=2, stop=[" tw"])
    texts = ["", ""]
    if stream:
        for choice in (event["choices"][0] for event in events_of(response)):
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        assert [c["finish_reason"] for c in response.json()["choices"]] == ["stop", "length"]
        assert response.json()["usage"]["completion_tokens"] == len("one tw") + len("one one")
    assert texts == ["one", "one one"]
    assert [request[-1] for request in backend.cancelled] == ["0"]


def test_faults_of_the_cluster(post: Poster, backend: FakeBackend) -> None:
    for fields, words in (({}, "without a finish reason"), ({"logprobs": True}, "a token came without")):
        backend.script = lambda _: one_token_then()
        response = post.chat(**fields)
        assert response.status_code == 502 and words in response.json()["error"]["message"]


def test_what_json_or_clients_cannot_take_is_the_lowest() -> None:
    shown = [finite(logprob) for logprob in (-math.inf, math.nan, -1e6, -0.25)]
    assert shown == [-9999.0, -9999.0, -9999.0, -0.25]
