"""docs/onward.md: the commands of its first steps, one after another, before two servers with a set pace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from benchmarks.paced import Pace
from benchmarks.paced_server import listening
from tests.served import LIMIT_S, START_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "onward.md").read_text(encoding="utf8")
NEEDED = 24
"""Streamed answers with measured times: a few more than are needed to learn."""


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two servers in a thread of their own."""
    loop, stop, found = asyncio.new_event_loop(), asyncio.Event(), list[str]()
    ready = threading.Event()

    async def serve() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                found.append(await stack.enter_async_context(listening(Pace(token_ms=5.0))))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(START_S)
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def blocks() -> list[str]:
    """The commands of the page that its comment promises are run."""
    (commands,) = re.findall(r"<!-- commands: .*?-->(.*)<!-- end of commands -->", PAGE, re.DOTALL)
    return re.findall(r"^```\n(.*?)^```$", commands, re.DOTALL | re.MULTILINE)


def test_the_steps_of_the_page(urls: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    shim = tmp_path / "bin" / "isthmus"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m isthmus "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    num_routers = 0
    for block in blocks():
        text = "set -e\n" + block
        for number, url in enumerate(urls, start=1):
            text = text.replace(f"http://10.0.0.{number}:8000", url)
        if "isthmus route" in block:
            num_routers += 1
            text = text.replace("isthmus route", "exec isthmus route --port 0")
            recording = folder / "flight.jsonl" if "--record" in block else None
            _route(text, tmp_path / "log", folder, environment, recording)
        else:
            done = subprocess.run(
                ["sh", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
            for line in filter(lambda line: "simulate" in line, block.splitlines()):
                assert done.stdout.count("As recorded, of ") == block.count("isthmus simulate"), line
    assert num_routers == 4


def _route(text: str, log: Path, folder: Path, environment: dict[str, str], recording: Path | None) -> None:
    """Starts the router, asks it, and ends it: until the recording has what can be learnt from, if it makes one."""
    with log.open("wb") as sink:
        process = subprocess.Popen(["sh", "-c", text], cwd=folder, env=environment, stdout=sink, stderr=sink)
    try:
        until = time.monotonic() + START_S
        while " to 2 servers (ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        url = re.findall(r" routes (\S+)", log.read_text())[0].replace("0.0.0.0", "127.0.0.1")
        key = "ISTHMUS_API_KEY" in text
        answers = [_answer(url, number) for number in range(1 if recording is None else NEEDED)]
        assert answers == [401 if key else 200] * len(answers)
        while recording is not None and _num_measured(recording) < NEEDED:
            assert time.monotonic() < until + LIMIT_S
            with ThreadPoolExecutor(4) as pool:
                assert set(pool.map(_answer, [url] * 8, range(8))) == {200}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()


def _answer(url: str, number: int) -> int:
    """The status of a streamed answer."""
    talk = [{"role": "user", "content": f"{number} says: {'tell me more of the sea. ' * (5 + number)}"}]
    body = {"model": "paced", "messages": talk, "max_tokens": 8 + number % 16, "stream": True}
    return httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=LIMIT_S).status_code


def _num_measured(recording: Path) -> int:
    lines = [msgspec.json.decode(line) for line in recording.read_bytes().splitlines()[1:]]
    return sum(1 for line in lines if line["event"].get("tbt_ns"))
