"""Computations that run side by side, each in a process of its own: bytes in, bytes out.

A worker is a module that is run as a program. It reads two lengths in a line, then so many bytes of what many workers
have in common and of what it alone is to do, and writes its answer on standard output. Its input stays open: when who
holds the other end dies, or does not want the answer any more, the worker leaves.
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
    """What one worker is told. Much of it may have the same object `shared`, which is moved once."""

    shared: bytes
    own: bytes


class Pool(ABC):
    """Where workers run."""

    @abstractmethod
    def run(self, module: str, works: Sequence[Work], report: Progress | None = None) -> list[bytes]:
        """All answers, in the order of `works`. When it is left with an exception, nothing of it runs any more.

        Raises ConfigError with what a worker says of a wrong trace or configuration, IsthmusError for one that died.
        """


class LocalPool(Pool):
    """`jobs` processes at once on this machine."""

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
    """Of one worker on this machine, which does not outlive this one's interest in it. Raises as `Pool.run`."""
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
    """What a worker's module does when it is run."""
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
