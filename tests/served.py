"""Runs `isthmus serve` as a user would: a real process, real sockets, a real HTTP client."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from isthmus.cli.main import main
from isthmus.live.cluster.local import LocalCluster
from tests.pace import paced

START_S = LIMIT_S = 90
"""Only so that a bug ends a test: nothing is decided by it, and a loaded machine takes its time."""
POLL_S = 0.02


class Client:
    """Asks a cluster over HTTP."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Without `verify` it reads the authorities of the whole web first, for a server that has no certificate.
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers, verify=False)
        self._polling = self._read = False
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def complete(self, prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy completion that also returns token ids; asserts status 200."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        reply = self.http.post("/v1/completions", json={**body, "return_token_ids": True, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def tokens(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        return self.complete(prompt, max_tokens, **fields)["choices"][0]["token_ids"]

    def gauge(self, name: str) -> dict[str, float]:
        """A metric's value by node, as it is now: nodes tell theirs twice a second."""
        if not self._polling:
            self.be_told()
        return self._last(name)

    def be_told(self) -> None:
        """Returns when each node has said all that was so when this was called."""
        before = self._last("node_beats_total")

        def said(node: str, beats: float) -> bool:
            """Twice: one may be on its way. Who began anew counts anew."""
            known = before.get(node, 0)
            return beats >= 2 + (known if beats >= known else 0)

        until = time.monotonic() + LIMIT_S
        while not all(said(*each) for each in self._last("node_beats_total").items()):
            assert time.monotonic() < until, f"a node has said nothing for {LIMIT_S} s\n{self.story()}"
            time.sleep(POLL_S)

    def _last(self, name: str) -> dict[str, float]:
        self._read = True
        found = re.findall(rf'^isthmus_{name}{{node="([^"]+)"}} (\S+)$', self.http.get("/metrics").text, re.M)
        return {node: float(value) for node, value in found}

    def total(self, name: str) -> float:
        """A metric's sum over the nodes."""
        return sum(self.gauge(name).values())

    def wait_until(self, holds: Callable[[], Any], what: str) -> None:
        """Polls a condition that must come true; fails with `what` when it does not. One that seems to hold already
        must do so by what nodes say afterwards."""
        until, self._polling, self._read = time.monotonic() + LIMIT_S, True, False
        try:
            if holds() and self._read:
                self.be_told()
            while not holds():
                assert time.monotonic() < until, f"not within {LIMIT_S} s: {what}\n{self.story()}"
                time.sleep(POLL_S)
        finally:
            self._polling = False

    def wait_until_asked(self, count: int, answers: Sequence[Future[Any]] = ()) -> None:
        """Returns when so many requests have come: they are under way, or of `answers` that are over."""

        def have_come() -> bool:
            num_over = sum(answer.done() for answer in answers)  # before the others: none is counted twice
            return num_over + int(self.http.get("/status").json()["requests_running"]) == count

        self.wait_until(have_come, f"{count} requests come")

    def story(self) -> str:
        """What the cluster said so far."""
        return ""


class Served(Client):
    """A running `isthmus serve`. Children are found through /proc, so that leaks are seen."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str, key: str | None = None) -> None:
        super().__init__(url, key)
        self.process, self.log = process, log

    def story(self) -> str:
        return self.log.read_text()

    def check_idle(self) -> None:
        """All that requests took comes back, on every node."""
        self.wait_until(lambda: not self._left(), "nothing is held")

    def _left(self) -> list[str]:
        """What nodes hold."""
        held = ("node_requests_running", "node_requests_waiting", "kv_blocks_transfer", "cache_pinned_blocks")
        left = [name for name in held if self.total(name)]
        return left if self.gauge("kv_blocks") == self.gauge("kv_blocks_available") else [*left, "kv_blocks"]

    def children(self) -> dict[str, int]:
        """Process ids of nodes and links, by the order of their start; without what reads large bodies, which starts
        when it is needed."""
        pids = [pid for pid in sorted(children_of(self.process.pid)) if _VERBS.intersection(command_line(pid))]
        return {f"child-{index}": pid for index, pid in enumerate(pids)}


_VERBS = {b"node", b"link"}


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def command_line(pid: int) -> list[bytes]:
    """Its words; none if it is not there."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def node_pid(pids: object, name: str) -> int:
    """The child that runs node `name`."""
    for pid in pids:  # type: ignore[attr-defined]
        if name.encode() in command_line(pid):
            return int(pid)
    raise AssertionError(f"no process of {name}")


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "isthmus", *arguments]


@contextlib.contextmanager
def serve(
    home: Path, settings: dict[str, Any] | None = None, *arguments: str, key: str | None = None
) -> Iterator[Served]:
    """`settings`: as in a configuration file, if there is to be one. `key`: to ask with. Starts on a free port and
    waits for the ready line; afterwards nothing may be held, and after draining nobody left."""
    log = home / "serve.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command("serve", "--port", "0", "--threads", "1", *_configured(home, settings), *arguments),
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        url, nodes = wait_until_ready(process, log)
        served = Served(process, log, url, key)
        with contextlib.closing(served.http):
            served.wait_until(lambda: served.gauge("kv_blocks").keys() >= nodes, "every node reports")
            yield served
            if process.poll() is None:
                served.check_idle()
        children = list(served.children().values())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0, log.read_text()
        assert not [pid for pid in children if alive(pid)], "a node outlived its cluster"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _configured(home: Path, settings: dict[str, Any] | None) -> list[str]:
    """A node that the machine keeps waiting is not dead, and one that is started again may take its time."""
    if settings is None:
        return ["--kv-memory", "64MiB"]
    path = home / "serve.yaml"
    limits = {"silence_s": 60, "rejoin_s": 60, "transfer_s": 60} | settings.get("limits", {})
    engine = {"kv_memory": "64MiB"} | paced(settings.get("engine", {}))
    path.write_text(json.dumps(settings | {"limits": limits, "engine": engine}))
    return ["--config", str(path)]


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> tuple[str, set[str]]:
    """The URL, and which nodes are there."""
    until = time.monotonic() + START_S
    while True:
        found = re.search(r" at (https?://\S+) with (.+) \(ready in", log.read_text())
        if found:
            return found[1], set(found[2].split(", "))
        assert process.poll() is None, f"serve ended at start:\n{log.read_text()}"
        assert time.monotonic() < until, f"serve was not ready within {START_S} s:\n{log.read_text()}"
        time.sleep(0.05)


def streamed(
    served: Client, prompt: list[int], max_tokens: int, answering: threading.Event, **fields: Any
) -> list[int]:
    """The token ids of a streamed answer; sets `answering` at the first."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= fields
    tokens: list[int] = []
    with served.http.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"]
                answering.set()
    return tokens


def refused(*arguments: str) -> tuple[int, str]:
    """Exit status and the only line of a `serve` that must not get as far as starting a node. In this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["isthmus", "serve", *arguments]),
        mock.patch.object(LocalCluster, "run", side_effect=AssertionError("it starts")),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as exit,
    ):
        main()
    return int(exit.value.code or 0), _only_line(out.getvalue(), err.getvalue())


def given_up(*arguments: str) -> tuple[int, str]:
    """The same of a `serve` whose nodes cannot start."""
    done = subprocess.run(
        command("serve", *arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, _only_line(done.stdout, done.stderr)


def _only_line(out: str, err: str) -> str:
    assert out == ""
    (line,) = err.strip().splitlines()
    return line
