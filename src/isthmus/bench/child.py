"""Another process of a benchmark, asked over a pipe. What crosses is msgpack, and nothing in it is executable."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import IO, Any

import msgspec

from isthmus.core.errors import StartError

START_S = 60.0
"""How long another process may take to start, or to answer."""
_LENGTH_BYTES = 4


class Pipe:
    """One end. A value is preceded by its length."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink

    def send(self, value: Any) -> None:
        body = msgspec.msgpack.encode(value)
        self._sink.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        self._sink.flush()

    def recv(self) -> Any:
        """Raises EOFError when the other end is gone."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        return msgspec.msgpack.decode(self._read(length))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._source.read(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def fileno(self) -> int:
        """To be watched for the end of the other side; nothing may have been read ahead."""
        return self._source.fileno()

    def close(self) -> None:
        for end in (self._sink, self._source):
            with contextlib.suppress(BrokenPipeError):
                end.close()


class Child:
    """Runs `serve(pipe, *arguments)`, a function of a module, in another process, which ends when its pipe does.

    `hello`: the first thing it says. Raises StartError when it says nothing.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        name = f"{serve.__module__}:{serve.__qualname__}"
        command = [sys.executable, "-c", f"from {__name__} import main; main()", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(self._process.stdout, self._process.stdin)
        self._pipe.send(arguments)
        self.hello: Any = self._receive()

    def ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._receive()

    def _receive(self) -> Any:
        with contextlib.suppress(EOFError):
            if select.select([self._pipe], [], [], START_S)[0]:
                return self._pipe.recv()
        self._pipe.close()
        self._process.kill()
        raise StartError(f"the other process of the benchmark ended (exit code {self._process.wait()})")

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """The other process: what it prints goes to standard error, for its standard output is the pipe."""
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    pipe = Pipe(os.fdopen(os.dup(0), "rb", buffering=0), sink)
    module, _, name = sys.argv[1].partition(":")
    gc.disable()  # while what is there for good comes, nobody looks for cycles
    serve: Callable[..., None] = getattr(import_module(module), name)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(BrokenPipeError):
        serve(pipe, *pipe.recv())
    os._exit(0)  # threads of the benchmark may wait for what never comes
