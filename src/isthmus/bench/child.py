"""Parts of a study that run elsewhere: in another process, asked over a pipe, or in an event loop in a thread.

Lines of JSON go to a process, and lines `= JSON` come back. It runs a function of ours, or a script in another Python,
which has the script's dependencies and not Isthmus.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from isthmus.bench import BenchError
from isthmus.core.errors import StartError

Value = TypeVar("Value")

START_S = 60.0
"""Longest start, or answer, of a function of ours."""
_ANSWER = b"= "


class Pipe:
    """One end of a pipe of JSON lines. Lines that come without `mark` are skipped: libraries print what they like."""

    def __init__(self, source: int, sink: int, *, mark: bytes = b"", signs: bytes = b"") -> None:
        self._source, self._sink, self._mark, self._signs = source, sink, mark, signs
        self._rest = b""

    def send(self, value: Any) -> None:
        os.write(self._sink, self._signs + msgspec.json.encode(value) + b"\n")

    def recv(self, limit_s: float | None = None) -> Any:
        """Raises EOFError when the other end is gone, or silent for `limit_s`."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                if line.startswith(self._mark):
                    return msgspec.json.decode(line[len(self._mark) :])
                continue
            more = b""
            if select.select([self._source], [], [], limit_s)[0]:
                more = os.read(self._source, 1 << 16)
            if not more:
                raise EOFError
            self._rest += more

    def fileno(self) -> int:
        """For watching whether the other side ends."""
        return self._source


class Asked:
    """A process that answers, and ends when its input does. `hello`: its first value.

    Raises StartError if it cannot be run or ends, BenchError with the message of an error that it reports.
    """

    def __init__(
        self, name: str, command: Sequence[str], *first: Any, limit_s: float | None = None, **how: Any
    ) -> None:
        self._name, self._limit_s = name, limit_s
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, **how
            )
        except OSError as error:
            raise StartError(f"{command[0]}: cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(self._process.stdout.fileno(), self._process.stdin.fileno(), mark=_ANSWER)
        try:
            for value in first:
                self._pipe.send(value)
            self.hello: Any = self._receive()
        except (BenchError, StartError):
            self.close()
            raise

    def ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv(self._limit_s)
        except EOFError:
            self._process.kill()
            code = self._process.wait()
            raise StartError(f"{self._name} ended without an answer (exit code {code})") from None
        if isinstance(answer, dict) and "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def close(self) -> None:
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            with contextlib.suppress(BrokenPipeError):
                end.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Child(Asked):
    """Runs `serve(pipe, *arguments)`, a function of a module, in another process."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        name = f"{serve.__module__}:{serve.__qualname__}"
        command = [sys.executable, "-c", f"from {__name__} import main; main()", name]
        super().__init__("the other process of the study", command, arguments, limit_s=START_S)


class Foreign(Asked):
    """A script of ours in another Python interpreter."""

    def __init__(
        self, python: str, script: Path, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> None:
        command = [python, "-I", str(script), *arguments]
        super().__init__(script.name, command, stderr=subprocess.DEVNULL, env=os.environ | (settings or {}))


class Loop:
    """In a thread of its own: `run` waits for a coroutine there; `soon` calls a function there and does not wait."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.soon = self._loop.call_soon_threadsafe

    def run(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._limit_s)

    def close(self) -> None:
        self.soon(self._loop.stop)
        self._thread.join()
        self._loop.close()


def main() -> None:
    """Main function of the other process. Its prints go to standard error: standard output is the pipe."""
    sink = os.dup(1)
    os.dup2(2, 1)
    pipe = Pipe(os.dup(0), sink, signs=_ANSWER)
    module, _, name = sys.argv[1].partition(":")
    gc.disable()  # modules stay for good: no collection while they are loaded, or over them later
    serve: Callable[..., None] = getattr(import_module(module), name)
    gc.freeze()
    gc.enable()
    with contextlib.suppress(BrokenPipeError):
        serve(pipe, *pipe.recv())
    os._exit(0)  # threads of the study may wait forever
