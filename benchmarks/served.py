"""`isthmus serve` as a user starts it, for benchmarks of a whole cluster."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from isthmus.bench import BenchError

START_S = 90.0


@contextlib.asynccontextmanager
async def served(config: Path, log: Path, start_s: float = START_S) -> AsyncIterator[tuple[str, int]]:
    """Its URL and process id, once it is ready. It is drained at the end. Raises BenchError when it does not start."""
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "isthmus", "serve", "--config", str(config)),
            stdout=sink,
            stderr=asyncio.subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        async with asyncio.timeout(start_s):
            while not (found := re.search(r" at (http://\S+) with ", log.read_text())):
                if process.returncode is not None:
                    raise BenchError(f"isthmus serve ended at its start: {last_line(log.read_text())}")
                await asyncio.sleep(0.1)
        yield found[1], process.pid
        process.send_signal(signal.SIGTERM)
        await process.wait()
    except TimeoutError:
        raise BenchError(f"isthmus serve was not ready within {start_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host, for a server that is to listen there: nobody else is given it meanwhile."""
    with socket.socket() as holder:
        # A server that says so, too, may listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
