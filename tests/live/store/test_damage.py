"""Flipped, torn, cut, misplaced and forgotten bytes: a miss, never a wrong block, never a crash, nothing leaked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from isthmus.core.types import BlockName
from isthmus.live.store import Arena, Log, Shape, Store, aligned_buffer
from isthmus.live.store.record import GROUP, RecordFormat
from tests.live.store.support import (
    LARGE,
    ODD,
    SMALL,
    CrashingFiles,
    content,
    log_bytes,
    opened,
    put,
    room,
    whole,
)

SHAPES = pytest.mark.parametrize("shape", [SMALL, LARGE, ODD], ids=["small", "large", "odd"])
NUM_BLOCKS = 20
"""More than lie together."""
NUM_FLIPS = 10_000
FLIPS_AT_ONCE = 20


def head_of(name: int, shape: Shape) -> slice:
    """Where in the file the header of block `name` is; it is in the place of that number."""
    record = RecordFormat(shape, b"test")
    start = record.head_offset(name)
    return slice(start, start + record.header_bytes)


def payload_of(name: int, shape: Shape) -> slice:
    record = RecordFormat(shape, b"test")
    start = record.payload_offset(name)
    return slice(start, start + record.payload_bytes)


def shifted(data: bytes, shape: Shape, part_of: Callable[[int, Shape], slice]) -> bytes:
    """The file with this part of every record where the next one's was."""
    changed = bytearray(data)
    for name in range(NUM_BLOCKS):
        changed[part_of((name + 1) % NUM_BLOCKS, shape)] = data[part_of(name, shape)]
    return bytes(changed)


def written(shape: Shape, folder: Path) -> tuple[Path, int]:
    """A full log of blocks, each without a parent; its one file and the capacity."""
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
    """Twenty at a time: each is in padding, or costs the block it hit and no other."""
    path, capacity = written(SMALL, tmp_path)
    random, file = Random(7), os.open(path, os.O_RDWR)
    parts = [(part(name, SMALL), name) for name in range(NUM_BLOCKS) for part in (head_of, payload_of)]
    wrong = missed = 0
    for _ in range(NUM_FLIPS // FLIPS_AT_ONCE):
        bits, lost = random.sample(range(8 * capacity), FLIPS_AT_ONCE), list[BlockName]()
        hit = {name for part, name in parts for bit in bits if part.start <= bit // 8 < part.stop}
        log = Log(path.parent, SMALL, capacity, b"test")
        store = Store(Arena(SMALL, 1), log, lost.extend, threads=1)
        if running:
            store.recover()
        for bit in bits:
            flip(file, bit)
        if not running:
            store.recover()
        for name in range(NUM_BLOCKS):
            into = room(SMALL)
            found = store.get(name, into)
            wrong += found and into != content(name, SMALL)
            missed += not found
            assert found or name in hit, "a block that was not hit is gone"
        store.check()
        stat = store.stat()
        assert stat.disk.num_blocks == log.num_used == sum(map(store.contains, range(NUM_BLOCKS)))
        assert stat.seal_mismatches == len(lost)
        store.close()
        for bit in bits:
            flip(file, bit)
    os.close(file)
    assert wrong == 0 and missed > NUM_FLIPS // 4


def one_by_one(store: Store, shape: Shape) -> list[bytes | None]:
    return [bytes(into) if store.get(name, into := room(shape)) else None for name in range(NUM_BLOCKS)]


def together(store: Store, shape: Shape) -> list[bytes | None]:
    """Into memory that a disk can write to, so that neighbours are read in one call."""
    size = shape.block_bytes
    buffer = aligned_buffer(NUM_BLOCKS * size)
    intos = [buffer[at * size : (at + 1) * size] for at in range(NUM_BLOCKS)]
    found = store.get_many(list(zip(range(NUM_BLOCKS), intos, strict=True)))
    return [bytes(into) if ok else None for ok, into in zip(found, intos, strict=True)]


def layer_by_layer(store: Store, shape: Shape) -> list[bytes | None]:
    found: list[bytes | None] = []
    for name in range(NUM_BLOCKS):
        into, size = room(shape), shape.slice_bytes
        parts = [
            store.read(name, at, at + 1, into[at * size : (at + 1) * size]) for at in range(shape.num_layers)
        ]
        found.append(bytes(into) if all(parts) else None)
    return found


@SHAPES
@pytest.mark.parametrize("way", [one_by_one, together, layer_by_layer])
def test_a_flipped_bit_is_found_however_a_block_is_read(
    way: Callable[[Store, Shape], list[bytes | None]], shape: Shape, tmp_path: Path
) -> None:
    path, capacity = written(shape, tmp_path)
    random, file = Random(3), os.open(path, os.O_RDWR)
    hit = {5, 11, 12}
    for name in hit:
        flip(file, 8 * payload_of(name, shape).start + random.randrange(8 * shape.block_bytes))
    os.close(file)
    with opened(shape, 1, path.parent, capacity) as store:
        assert len(store.recover()) == NUM_BLOCKS
        found = way(store, shape)
        assert found == [None if name in hit else bytes(content(name, shape)) for name in range(NUM_BLOCKS)]
        assert store.stat().seal_mismatches == len(hit)


@SHAPES
@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
def test_records_copied_over_others(shape: Shape, running: bool, tmp_path: Path) -> None:
    """All right in themselves, all in the wrong place."""
    path, capacity = written(shape, tmp_path)
    with opened(shape, 1, path.parent, capacity) as store:
        if running:
            assert len(store.recover()) == NUM_BLOCKS
        data = shifted(shifted(path.read_bytes(), shape, head_of), shape, payload_of)
        with path.open("r+b") as file:
            file.write(data)
        if not running:
            assert store.recover() == []
        assert not any(whole(store, name) for name in range(NUM_BLOCKS))
        assert store.stat().seal_mismatches == (NUM_BLOCKS if running else 0)
        assert store.stat().disk.num_blocks == 0


@SHAPES
def test_payloads_under_other_headers(shape: Shape, tmp_path: Path) -> None:
    path, capacity = written(shape, tmp_path)
    path.write_bytes(shifted(path.read_bytes(), shape, payload_of))
    with opened(shape, 1, path.parent, capacity) as store:
        assert len(store.recover()) == NUM_BLOCKS
        assert not any(whole(store, name) for name in range(NUM_BLOCKS))
        assert store.stat().seal_mismatches == NUM_BLOCKS


@SHAPES
def test_files_cut_short(shape: Shape, tmp_path: Path) -> None:
    path, capacity = written(shape, tmp_path)
    data, ends = (
        path.read_bytes(),
        [payload_of(name, shape).start + shape.block_bytes for name in range(NUM_BLOCKS)],
    )
    for end in (0, 1, ends[0] - 1, ends[0], ends[15] + 10, ends[17] - 1, capacity - shape.slice_bytes):
        path.write_bytes(data[:end])
        with opened(shape, NUM_BLOCKS, path.parent, capacity) as store:
            store.recover()
            intos = [room(shape) for _ in range(NUM_BLOCKS)]
            found = store.get_many(list(zip(range(NUM_BLOCKS), intos, strict=True)))
            assert found == [there <= end for there in ends]
            assert all(
                not ok or into == content(name, shape)
                for name, (ok, into) in enumerate(zip(found, intos, strict=True))
            )
            assert all(store.put(name, None, content(name, shape)) for name in range(NUM_BLOCKS))
            store.flush()
            assert store.stat().disk.num_blocks == NUM_BLOCKS, "all places are good for new blocks"
        assert path.stat().st_size == capacity


def test_a_file_that_is_missing_or_without_its_first_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.live.store.log.SEGMENT_BYTES", 1)
    capacity, num_blocks = log_bytes(SMALL, 3 * GROUP, tmp_path), 3 * GROUP
    with opened(SMALL, num_blocks, tmp_path / "log", capacity) as store:
        for name in range(num_blocks):
            store.put(name, None, content(name, SMALL))
        store.flush()
    first, second, _ = sorted((tmp_path / "log").glob("blocks-*"))
    first.unlink()
    noise = Random(1).randbytes(capacity)
    second.write_bytes(second.read_bytes()[: head_of(1, SMALL).start] + noise)
    with opened(SMALL, num_blocks, tmp_path / "log", capacity) as store:
        left = range(2 * GROUP, 3 * GROUP)
        assert store.recover() == [(GROUP, None), *[(name, None) for name in left]]
        assert all(whole(store, name) for name in left) and not whole(store, GROUP)
        put(store, *range(2 * GROUP))
        store.flush()
        assert store.stat().disk.num_blocks == num_blocks


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_shows_whose_it_is_before_its_first_record_is_on_the_disk(shape: Shape) -> None:
    """A power cut leaves payloads without their headers: the next start takes the file over all the same."""
    capacity, files = RecordFormat(shape, b"").file_bytes(4), CrashingFiles()
    log = Log("log", shape, capacity, b"test", files=files)
    log.grow()
    files.crash(Random(0))
    log.close()
    (name,) = [name for name in files.names(0) if name != "lock"]
    fd = files.open(0, name, direct=False)
    files.write(fd, [b"payload"], log.format.payload_offset(0))
    Log("log", shape, capacity, b"test", files=files).close()


@SHAPES
@pytest.mark.parametrize("seed", range(25))
def test_power_cuts(shape: Shape, seed: int) -> None:
    """What a flush acknowledged survives any loss of unsynced sectors, again and again; the rest is a miss."""
    random, files = Random(seed), CrashingFiles()
    capacity = RecordFormat(shape, b"").file_bytes(24)
    known: set[int] = set()  # may be there
    acked: set[int] = set()  # must be there
    for _ in range(6):
        log = Log("log", shape, capacity, b"test", files=files)
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
