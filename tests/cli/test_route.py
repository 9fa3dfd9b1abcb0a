"""`isthmus route`: a process before two servers, asked by OpenAI's client; and what it refuses."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.cli.conftest import Command
from tests.live.servers.plain_fake import WORDS, FakeServer
from tests.served import LIMIT_S, START_S, command


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    """Two servers in a thread of their own."""
    loop, found = asyncio.new_event_loop(), [FakeServer(), FakeServer()]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for server in found:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(LIMIT_S)
    yield found
    for server in found:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(LIMIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_openai_s_client_before_two_servers(servers: list[FakeServer], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as sink:
        urls = [servers[0].url.removeprefix("http://"), servers[1].url + "/v1/"]
        process = subprocess.Popen(
            command("route", *urls, "--port", "0"), stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + START_S
        while " to 2 servers (ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        assert log.read_text().count("m, vllm, 1,024 tokens of KV memory") == 2
        url = log.read_text().split(" routes ")[1].split()[0]
        with OpenAI(base_url=f"{url}/v1", api_key="of-client") as client:
            assert [model.id for model in client.models.list()] == ["m"]
            for _ in range(3):
                chunks = client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "Tell me an old story of the sea. " * 8}],
                    stream=True,
                )
                assert "".join(
                    each.choices[0].delta.content or "" for each in chunks if each.choices
                ) == "".join(WORDS)
        assert sorted(len(server.bodies) for server in servers) == [0, 3], "one prompt, one cache"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ftp://host",), "'ftp://host' is no server: write http://HOST:PORT"),
        (("http://host/path",), "'http://host/path' is no server"),
        (("http://127.0.0.1:9", "--policy", "nearest"), "policy: no policy"),
        (("http://127.0.0.1:9", "--port", "0"), "no server answers: http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_line(isthmus: Command, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = isthmus("route", *arguments)
    assert status and out == "" and says in err and err.count("\n") == 1
