"""`isthmus route` before two `isthmus serve` that are killed amid answers: each answer is that of a server alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import make_model
from tests.served import START_S, command, wait_until_ready

NUM_TOKENS = 600
KILLS = 4


class Process:
    """A process and its children, which end together."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log, self.arguments = log, arguments
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command(*self.arguments),
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(home: Path, model: Path) -> Iterator[tuple[str, dict[str, Process]]]:
    """The URL of a router, and its two servers by their URLs."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, Process] = {}
        for number in range(2):
            options = ("--model", str(model), "--kv-memory", "64MiB", "--threads", "1")
            server = Process(home / f"server-{number}", "serve", "--port", "0", *options)
            stack.callback(server.kill)
            url, _ = wait_until_ready(server.process, server.log)
            server.arguments = ("serve", "--port", url.rpartition(":")[2], *options)
            servers[url] = server
        router = Process(home / "router", "route", "--port", "0", *servers)
        stack.callback(router.kill)
        until = time.monotonic() + START_S
        while (found := re.search(r"routes (\S+) to", router.log.read_text())) is None:
            assert time.monotonic() < until and router.process.poll() is None, router.log.read_text()
            time.sleep(0.05)
        yield found[1], servers


def bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(4):
        text = f"{number} — a “story” of the sea, 😀"
        common = {
            "model": model, "temperature": 0, "stream": True, "max_tokens": NUM_TOKENS,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        chat = {"messages": [{"role": "user", "content": text}], "stop": ["never, never said"]}
        found += [("/v1/completions", {"prompt": text, **common}), ("/v1/chat/completions", chat | common)]
    return found


def ask(url: str, path: str, body: dict[str, Any], begun: threading.Event | None = None) -> tuple[str, Any]:
    """The text of an answer, and its counts without those of the cache."""
    text, usage, ended = "", None, False
    with httpx.stream("POST", url + path, json=body, timeout=START_S) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                usage = event.get("usage") or usage
                if text and begun is not None:
                    begun.set()
    assert ended
    return text, {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def statuses(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/status", timeout=START_S).json()["servers"]
    return found


@pytest.mark.timeout(900)
def test_killed_servers_cost_time_and_no_token(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    with running(tmp_path, tmp_path / "model") as (url, servers), ThreadPoolExecutor(8) as pool:
        asked = bodies(httpx.get(f"{url}/v1/models").json()["data"][0]["id"])
        expected = [ask(next(iter(servers)), path, body) for path, body in asked]
        for number in range(KILLS):
            begun = [threading.Event() for _ in asked]
            answers = [
                pool.submit(ask, url, path, body, event)
                for (path, body), event in zip(asked, begun, strict=True)
            ]
            assert all(event.wait(START_S) for event in begun)
            busy = max(statuses(url), key=lambda each: each["requests_running"])
            victim = servers[busy["server"]]
            victim.kill()
            assert [answer.result() for answer in answers] == expected, f"kill {number}"
            victim.start()
            wait_until_ready(victim.process, victim.log)
            until = time.monotonic() + START_S
            while not all(each["up"] for each in statuses(url)):
                assert time.monotonic() < until
                time.sleep(0.05)
        assert sum(each["continued_total"] for each in statuses(url)) >= KILLS
