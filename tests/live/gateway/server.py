"""Serves an app on a real loopback socket, in a thread of its own: with uvicorn, or as `isthmus serve` does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from isthmus.live.gateway.server import Certificate, bind, serve_http
from isthmus.live.gateway.tenants import Phase

START_TIMEOUT_S = 60


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The base URL of `app` while it is served."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert server.ready.wait(START_TIMEOUT_S), "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        listener.close()


class Front:
    """An app that `serve_http` serves. Everything is asked over plain sockets, so that anything can be sent."""

    def __init__(self, app: Any, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.port, self._loop = app, port, loop
        self.stopping, self.at_once = asyncio.Event(), asyncio.Event()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.stopping.set)

    def end_now(self) -> None:
        self._loop.call_soon_threadsafe(self.at_once.set)

    def stop_and_end_now(self) -> None:
        """In one step: between two the server may end, and its loop with it."""

        def both() -> None:
            self.stopping.set()
            self.at_once.set()

        self._loop.call_soon_threadsafe(both)

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, called by the server between two other things that it does."""

        async def work() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(START_TIMEOUT_S)

    def later(self, seconds: float) -> None:
        """So much later all deadlines are looked at."""
        traffic = self.app.state.traffic
        now_s = traffic.clock() + seconds
        traffic.clock = lambda: now_s
        self.call(traffic.sweep)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Asks the server again and again."""
        until = time.monotonic() + START_TIMEOUT_S
        while not self.call(holds):
            assert time.monotonic() < until
            time.sleep(0.005)

    def wait_for(self, phase: Phase, count: int = 1) -> None:
        """Returns when so many connections are in this phase."""
        self.wait_until(lambda: len(self.app.state.traffic._since[phase]) == count)

    def connect(self, *said: bytes) -> Client:
        client = Client(socket.create_connection(("127.0.0.1", self.port), timeout=START_TIMEOUT_S))
        client.send(*said)
        return client

    def ask(self, *said: bytes) -> Answer:
        """The only answer to this."""
        (answer,) = self.connect(*said).answers()
        return answer

    def metric(self, name: str) -> float:
        """0 while there is none."""
        lines = self.ask(get("/metrics")).body.decode().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"isthmus_{name} ")), 0.0)


class Client:
    """One connection. `send` does not mind that the server hears no more; `answers` ends where the server ends it."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened

    def send(self, *said: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in said:
                self.socket.sendall(part)

    def read(self) -> bytes:
        """All until the server closes the connection."""
        read = bytearray()
        with self.socket:
            while part := self.socket.recv(65536):
                read += part
        return bytes(read)

    def is_cut_off(self) -> bool:
        """Waits until the server ends it; whether it does without a word. What it had not read resets it."""
        try:
            return self.read() == b""
        except ConnectionResetError:
            return True

    def read_until(self, what: bytes) -> bytes:
        read = bytearray()
        while what not in read:
            part = self.socket.recv(65536)
            assert part, bytes(read)
            read += part
        return bytes(read)

    def answers(self) -> list[Answer]:
        rest, found = self.read(), []
        while rest:
            answer, rest = _cut(rest)
            found.append(answer)
        return found


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def error(self) -> str:
        """The message of OpenAI's error object."""
        found = json.loads(self.body)
        assert found["error"].keys() == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return str(found["error"]["message"])


def _cut(read: bytes) -> tuple[Answer, bytes]:
    """The first of several answers, and the rest."""
    head, rest = read.split(b"\r\n\r\n", 1)
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines), head
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while True:
            size, rest = rest.split(b"\r\n", 1)
            part, rest = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
            body += part
            if not part:
                break
    elif "content-length" in headers:
        length = int(headers["content-length"])
        body, rest = rest[:length], rest[length:]
        assert len(body) == length, "the answer is cut off"
    elif not first.startswith("HTTP/1.1 1"):
        body, rest = rest, b""
    return Answer(int(first.split()[1]), headers, body), rest


def get(path: str, *headers: str, version: str = "1.1", close: bool = True) -> bytes:
    lines = [f"GET {path} HTTP/{version}", "host: test", *headers, *["connection: close"] * close]
    return "\r\n".join([*lines, "", ""]).encode()


def post(path: str, body: Any, *headers: str, version: str = "1.1", close: bool = True) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "host: test", f"content-length: {len(content)}", *headers]
    return "\r\n".join([*lines, *["connection: close"] * close, "", ""]).encode() + content


@contextmanager
def fronted(app: Any, certificate: Certificate | None = None, *, drain_s: float = 60) -> Iterator[Front]:
    """`app` as `isthmus serve` serves it; afterwards nothing may be left of it."""
    loop = uvloop.new_event_loop()
    bound = bind("127.0.0.1", 0)
    front = Front(app, bound.getsockname()[1], loop)

    async def serve() -> None:
        await serve_http(
            app, bound, front.stopping, drain_s=drain_s, at_once=front.at_once, certificate=certificate
        )
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks outlive the server: {left}"

    errors: list[BaseException] = []

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            errors.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        if not loop.is_closed():
            front.stop_and_end_now()
        thread.join(START_TIMEOUT_S)
        assert not thread.is_alive(), "the server does not end"
    assert not errors, errors
    assert app.state.traffic.num_connections == 0 and app.state.traffic.body_bytes == 0


def trusting(authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    return context
