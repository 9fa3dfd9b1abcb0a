"""Kills a process with -9 in the middle of its work on a store, again and again, and looks at what is left.

    python -m tests.live.store.killing --cycles 1000

Each cycle a worker opens the folder that its predecessor left, offers and reads all blocks, then puts, drops and
demotes until it is killed at a random moment. It says what is durable (after a flush) and what it is about to drop,
so that what is found can be judged: a block that was acknowledged and not dropped must be there, and every block
that is given must be right.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from isthmus.live.store import Arena, Log, Shape, Store
from tests.live.store.support import ODD, SMALL, content, room

NUM_NAMES = 96
"""Blocks that exist; the log has room for all of them."""
NUM_SLOTS = 24
LIFE_S = 0.08
"""A worker is killed at most so long after its first reports."""


class Counts(msgspec.Struct):
    """What a series of cycles came to."""

    shape: str
    cycles: int = 0
    crashes: int = 0
    """Workers that ended by themselves."""
    wrong_blocks: int = 0
    lost_acknowledged: int = 0
    leaked_places: int = 0
    bytes_over_capacity: int = 0
    blocks_offered: int = 0
    torn_blocks: int = 0
    """Offered, and found damaged when read: a miss."""
    acknowledged: int = 0


Report = list[Any]
"""A kind and its values. First "opened": names of whole blocks, and how many were offered, torn, wrong and leaked. Then
"durable" and "dropping", with names."""


def capacity_of(shape: Shape) -> int:
    with tempfile.TemporaryDirectory() as folder:
        log = Log(folder, shape, 1 << 30, b"")
        log.close()
    return log.format.file_bytes(NUM_NAMES)


def work(folder: str, shape: Shape, capacity: int, seed: int, out: int) -> None:
    """Runs until it is killed."""

    def say(*report: Any) -> None:
        os.write(out, msgspec.json.encode(report) + b"\n")

    log = Log(folder, shape, capacity, b"kill")
    store = Store(Arena(shape, NUM_SLOTS), log, threads=2)
    offered = [int(name) for name, _ in store.recover()]
    intos = [room(shape) for _ in offered]
    found = store.get_many(list(zip(offered, intos, strict=True)))
    whole = [name for name, there in zip(offered, found, strict=True) if there]
    wrong = sum(
        there and into != content(name, shape) for name, there, into in zip(offered, found, intos, strict=True)
    )
    store.check()
    leaked = log.num_used - len(whole)
    say("opened", whole, len(offered), len(offered) - len(whole), wrong, leaked)
    random = Random(seed)
    while True:
        for name in random.sample(range(NUM_NAMES), 8):
            if not store.contains(name):
                store.put(name, None, content(name, shape))
        store.demote(name for name in range(NUM_NAMES) if random.random() < 0.5 and store.contains(name))
        if store.flush() and not store.stat().queued_blocks:
            say("durable", [name for name in range(NUM_NAMES) if store.contains(name)])
        drops = [name for name in range(NUM_NAMES) if random.random() < 0.1]
        say("dropping", drops)
        store.drop(drops)


def spawn(folder: str, shape: Shape, capacity: int, seed: int) -> tuple[int, int]:
    """A worker and the pipe it reports to. Forked, since starting an interpreter takes ten times as long."""
    read_end, write_end = os.pipe()
    worker = os.fork()
    if not worker:
        try:
            os.close(read_end)
            work(folder, shape, capacity, seed, write_end)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    os.close(write_end)
    return worker, read_end


def reports_until_killed(worker: int, pipe: int, random: Random) -> Iterator[Report]:
    """Kills the worker at a random moment after its first reports, or before them now and then: by then something is
    acknowledged now and then, however slow the machine is."""
    data, count = b"", random.randrange(4)
    while data.count(b"\n") < count and (more := os.read(pipe, 1 << 16)):
        data += more
    time.sleep(random.random() * LIFE_S)
    os.kill(worker, signal.SIGKILL)
    while more := os.read(pipe, 1 << 16):
        data += more
    os.close(pipe)
    yield from (msgspec.json.decode(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n"))


def run(label: str, cycles: int, shape: Shape, folder: str) -> Counts:
    counts, random, capacity = Counts(label), Random(label), capacity_of(shape)
    durable: set[int] = set()
    for name in range(NUM_NAMES):
        content(name, shape)  # made once; workers share it
    for cycle in range(cycles):
        worker, pipe = spawn(folder, shape, capacity, cycle)
        for report in reports_until_killed(worker, pipe, random):
            match report:
                case "opened", whole, num_offered, num_torn, num_wrong, num_leaked:
                    counts.lost_acknowledged += len(durable - set(whole))
                    counts.blocks_offered += num_offered
                    counts.torn_blocks += num_torn
                    counts.wrong_blocks += num_wrong
                    counts.leaked_places += num_leaked
                    durable = set(whole)
                case "durable", names:
                    durable = set(names)
                    counts.acknowledged += len(names)
                case "dropping", names:
                    durable -= set(names)
        _, status = os.waitpid(worker, 0)
        counts.crashes += os.waitstatus_to_exitcode(status) != -signal.SIGKILL
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        counts.bytes_over_capacity += max(0, size - capacity)
        counts.cycles += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=1000)
    cycles = parser.parse_args().cycles
    shapes = {"small": SMALL, "odd": ODD, "large": Shape(num_layers=4, slice_bytes=128 * 1024)}
    for number, (label, shape) in enumerate(shapes.items()):
        share = cycles // 3 + (number < cycles % 3)
        with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
            print(msgspec.json.encode(run(label, share, shape, folder)).decode(), flush=True)


if __name__ == "__main__":
    main()
