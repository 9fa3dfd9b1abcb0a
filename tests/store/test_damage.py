"""Flipped, torn, cut, misplaced and forgotten bytes: a miss, never a wrong block, never a crash, nothing leaked."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from isthmus.store import Arena, Log, Shape, Store
from isthmus.types import BlockName
from tests.store.support import LARGE, ODD, SMALL, CrashingFiles, content, log_bytes, opened, put, room, whole

SHAPES = pytest.mark.parametrize("shape", [SMALL, LARGE, ODD], ids=["small", "large", "odd"])
NUM_BLOCKS = 8
NUM_FLIPS = 10_000


def written(shape: Shape, folder: Path) -> tuple[Path, int]:
    """A full log of blocks 0 to 7, each without a parent; its one file and the capacity."""
    capacity = log_bytes(shape, NUM_BLOCKS, folder)
    with opened(shape, NUM_BLOCKS, folder / "log", capacity) as store:
        assert all(store.put(name, None, content(name, shape)) for name in range(NUM_BLOCKS))
        store.flush()
    (path,) = (folder / "log").glob("blocks-*")
    assert path.stat().st_size == capacity
    return path, capacity


def flip(file: int, bit: int) -> None:
    byte = os.pread(file, 1, bit // 8)[0] ^ 1 << bit % 8
    os.pwrite(file, bytes([byte]), bit // 8)


@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
def test_10_000_flipped_bits(running: bool, tmp_path: Path) -> None:
    """Each flip of its own is either in padding or costs exactly the block it hit."""
    path, capacity = written(SMALL, tmp_path)
    random, file = Random(7), os.open(path, os.O_RDWR)
    detected = harmless = wrong = 0
    for _ in range(NUM_FLIPS // 20):
        bits = random.sample(range(8 * capacity), 20)
        lost: list[BlockName] = []
        log = Log(path.parent, SMALL, capacity, b"test")
        store = Store(Arena(SMALL, 1), log, lost.extend, threads=1)
        if running:
            store.recover()
        for at in range(20):
            flip(file, bits[at])
        if not running:
            store.recover()
        hit = {bit // 8 // log.format.record_bytes for bit in bits}
        for name in range(NUM_BLOCKS):
            into = room(SMALL)
            found = store.get(name, into)
            wrong += found and into != content(name, SMALL)
            assert found or name in hit, "a block that was not hit is gone"
            detected += not found
            harmless += found and name in hit
        store.check()
        stat = store.stat()
        assert stat.disk.num_blocks == NUM_BLOCKS - sum(not store.contains(name) for name in range(NUM_BLOCKS))
        assert stat.seal_mismatches == len(lost)
        store.close()
        for at in range(20):
            flip(file, bits[at])
    os.close(file)
    assert wrong == 0 and detected > NUM_FLIPS // 40
    if running:
        assert harmless > 0, "some hit headers, which are not read again, or padding"


@SHAPES
@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
def test_records_copied_over_others(shape: Shape, running: bool, tmp_path: Path) -> None:
    """Every record is written where the next one was, whole: all right in itself, all in the wrong place."""
    path, capacity = written(shape, tmp_path)
    size = capacity // NUM_BLOCKS
    with opened(shape, 1, path.parent, capacity) as store:
        if running:
            assert len(store.recover()) == NUM_BLOCKS
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.write(data[size:] + data[:size])
        if not running:
            assert store.recover() == []
        assert not any(whole(store, name) for name in range(NUM_BLOCKS))
        assert store.stat().seal_mismatches == (NUM_BLOCKS if running else 0)
        assert store.stat().disk.num_blocks == 0


@SHAPES
def test_payloads_swapped_under_their_headers(shape: Shape, tmp_path: Path) -> None:
    path, capacity = written(shape, tmp_path)
    size = capacity // NUM_BLOCKS
    data = bytearray(path.read_bytes())
    head = size - (
        size - shape.block_bytes
    )  # the payload is shorter than the record; move what lies behind heads
    data[size - head : size], data[2 * size - head : 2 * size] = (
        data[2 * size - head : 2 * size],
        data[size - head : size],
    )
    path.write_bytes(data)
    with opened(shape, 1, path.parent, capacity) as store:
        assert len(store.recover()) == NUM_BLOCKS
        assert [whole(store, name) for name in range(NUM_BLOCKS)] == [False, False] + [True] * 6
        assert store.stat().seal_mismatches == 2


@SHAPES
def test_files_cut_short(shape: Shape, tmp_path: Path) -> None:
    path, capacity = written(shape, tmp_path)
    size, data = capacity // NUM_BLOCKS, path.read_bytes()
    for end in (0, 1, size - 1, size, 3 * size + size // 2, capacity - shape.slice_bytes):
        path.write_bytes(data[:end])
        with opened(shape, NUM_BLOCKS, path.parent, capacity) as store:
            store.recover()
            intos = [room(shape) for _ in range(NUM_BLOCKS)]
            found = store.get_many(list(zip(range(NUM_BLOCKS), intos, strict=True)))
            needed = store.log.format.header_bytes + shape.block_bytes if store.log else 0
            assert found == [end >= name * size + needed for name in range(NUM_BLOCKS)]
            assert all(
                not ok or into == content(name, shape)
                for name, (ok, into) in enumerate(zip(found, intos, strict=True))
            )
            assert all(store.put(name, None, content(name, shape)) for name in range(NUM_BLOCKS))
            store.flush()
            assert store.stat().disk.num_blocks == NUM_BLOCKS, "all places are good for new blocks"
        assert path.stat().st_size == capacity


def test_a_file_that_is_missing_or_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = log_bytes(SMALL, 1, tmp_path)
    monkeypatch.setattr("isthmus.store.segments.SEGMENT_BYTES", 2 * one)
    with opened(SMALL, 6, tmp_path / "log", 6 * one) as store:
        for name in range(6):
            store.put(name, None, content(name, SMALL))
            store.flush()
    first, second, _ = sorted((tmp_path / "log").glob("blocks-*"))
    first.unlink()
    second.write_bytes(Random(1).randbytes(9 * one))
    with opened(SMALL, 6, tmp_path / "log", 6 * one) as store:
        assert store.recover() == [(4, None), (5, None)]
        assert whole(store, 4) and whole(store, 5)
        put(store, 1, 2, 3)
        store.flush()
        assert store.stat().disk.num_blocks == 5


@SHAPES
@pytest.mark.parametrize("seed", range(25))
def test_power_cuts(shape: Shape, seed: int) -> None:
    """What a flush acknowledged survives any loss of unsynced sectors, again and again; the rest is a miss."""
    random, files = Random(seed), CrashingFiles()
    size = Log("log", shape, 1 << 30, b"test", files=CrashingFiles()).format.record_bytes
    known: set[int] = set()  # may be there
    acked: set[int] = set()  # must be there
    for _ in range(6):
        log = Log("log", shape, 24 * size, b"test", files=files)
        store = Store(Arena(shape, 24), log, threads=1)
        offered = {name for name, _ in store.recover()}
        assert offered <= known and acked <= {name for name in offered if whole(store, name)}, (
            "acknowledged and lost"
        )
        assert all(whole(store, name) or not store.contains(name) for name in offered)
        files.writes_left = random.randrange(1, 12)
        for name in random.sample(range(24), 12):
            if random.random() < 0.3 and name in acked:
                acked.discard(name)
                store.drop([name])
            elif not store.contains(name):
                store.put(name, None, content(name, shape))
                known.add(name)
            if random.random() < 0.5:
                store.flush()
                stat = store.stat()
                if not (stat.degraded or stat.queued_blocks):
                    acked = {name for name in range(24) if store.contains(name)}
        store.check()
        files.crash(random)
        store.close()
