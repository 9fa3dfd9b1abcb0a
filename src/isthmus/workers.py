"""Parallel computations, each in a process of its own: bytes in, bytes out.

A worker is a module run as a program. It reads a line of two lengths, then so many bytes of shared and of own input,
and writes its answer to standard output. Its input stays open: when its parent dies or closes it, the worker exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence

import msgspec

from isthmus.config import child_environment
from isthmus.core.errors import ConfigError, IsthmusError

Progress = Callable[[int, int], None]
"""Hears (done, of how many)."""


class Work(msgspec.Struct, frozen=True):
    """Input of a worker. Works may have the same object `shared`, which a pool moves once."""

    shared: bytes
    own: bytes


class Pool(ABC):
    """Runs workers somewhere."""

    @abstractmethod
    def run(self, module: str, works: Sequence[Work], report: Progress | None = None) -> list[bytes]:
        """Returns all answers, in the order of `works`. No worker is left running after an exception.

        Raises ConfigError with a worker's complaint about a trace or configuration, IsthmusError for a worker that
        died.
        """


class LocalPool(Pool):
    """Runs up to `jobs` processes on this machine."""

    def __init__(self, jobs: int) -> None:
        if jobs < 1:
            raise ConfigError(f"--jobs {jobs}: at least 1 process must run")
        self._jobs = jobs

    def run(self, module: str, works: Sequence[Work], report: Progress | None = None) -> list[bytes]:
        return asyncio.run(self._run(module, works, report))

    async def _run(self, module: str, works: Sequence[Work], report: Progress | None) -> list[bytes]:
        found = [b""] * len(works)
        waiting = iter(enumerate(works))
        done = itertools.count(1)

        async def worker() -> None:
            for index, work in waiting:
                found[index] = await answer(module, work)
                if report is not None:
                    report(next(done), len(works))

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self._jobs, len(works))):
                    workers.create_task(worker())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return found


async def answer(module: str, work: Work) -> bytes:
    """Returns the answer of a worker on this machine, which is killed if this is cancelled. Raises as `Pool.run`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module), stdin=PIPE, stdout=PIPE, stderr=PIPE, env=child_environment(1)
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        process.stdin.writelines([b"%d %d\n" % (len(work.shared), len(work.own)), work.shared, work.own])
        output, errors, _ = await asyncio.gather(
            process.stdout.read(), process.stderr.read(), _sent(process.stdin)
        )
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        said = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        if code == ConfigError.exit_code:
            raise ConfigError(said[-1])
        raise IsthmusError(f"a worker ended with {code}: {said[-1]}")
    return output


async def _sent(stream: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # it ended early, and its exit status says why
        await stream.drain()


def serve(compute: Callable[[bytes, bytes], bytes]) -> None:
    """Runs a worker: the main program of its module."""
    source = sys.stdin.buffer
    shared, own = [source.read(int(length)) for length in source.readline().split()]
    threading.Thread(target=_leave_with_input, daemon=True).start()
    try:
        found = compute(shared, own)
    except IsthmusError as error:
        print(error, file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    sys.stdout.buffer.write(found)


def _leave_with_input() -> None:
    """Reads past the buffer of `sys.stdin`, whose lock an ending interpreter would want."""
    os.read(0, 1)
    os._exit(1)
