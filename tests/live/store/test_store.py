from __future__ import annotations

import errno
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from isthmus.core.types import BlockName, Tier
from isthmus.live.store import Files, Shape
from isthmus.live.store.reader import Fault
from tests.live.store.support import (
    LARGE,
    ODD,
    SMALL,
    FaultyFiles,
    content,
    descriptors,
    log_bytes,
    opened,
    put,
    room,
    seals_of,
    whole,
)

SHAPES = pytest.mark.parametrize("shape", [SMALL, LARGE, ODD], ids=["small", "large", "odd"])


@SHAPES
def test_blocks_come_back_from_dram_from_the_ssd_and_after_a_restart(shape: Shape, tmp_path: Path) -> None:
    names = list(range(8))
    with opened(shape, 8, tmp_path) as store:
        put(store, *names)
        assert all(whole(store, name) for name in names)
        assert store.flush()
        store.demote(names)
        assert [store.tier(name) for name in names] == [Tier.DISK] * 8
        assert store.stat().memory.used_bytes == 0
        assert all(whole(store, name) for name in names)
    with opened(shape, 1, tmp_path) as store:
        assert store.recover() == [(name, name - 1 if name else None) for name in names]
        assert all(whole(store, name) for name in names)


@SHAPES
def test_many_at_once(shape: Shape, tmp_path: Path) -> None:
    names = list(range(60))
    with opened(shape, 60, tmp_path) as store:
        assert all(store.put_many([(name, None, content(name, shape)) for name in names]))
        store.flush()
        store.demote(name for name in names if name % 3)
        asked = [*names, 1000, *names[::-1]]
        intos = [room(shape) for _ in asked]
        assert store.get_many(list(zip(asked, intos, strict=True))) == [name != 1000 for name in asked]
        for name, into in zip(asked, intos, strict=True):
            assert name == 1000 or into == content(name, shape)
        assert store.get_many([]) == []


def test_a_block_found_damaged_in_its_slot_is_in_no_tier(tmp_path: Path) -> None:
    lost: list[BlockName] = []
    with opened(SMALL, 4, tmp_path, on_lost=lost.extend) as store:
        put(store, 1, 2)
        store.flush()
        pinned = store.pin([1])[0]
        assert pinned is not None
        store.condemn(1, pinned.slot + 1)
        assert store.contains(1) and not lost
        store.condemn(1, pinned.slot)
        assert not store.contains(1) and lost == [1] and store.stat().lost_blocks == 1
        put(store, 1)
        store.condemn(1, pinned.slot)
        assert whole(store, 1) and lost == [1]
        store.unpin([pinned])
        store.check()


def test_without_an_ssd_demoted_blocks_are_lost() -> None:
    lost: list[BlockName] = []
    with opened(SMALL, 2, on_lost=lost.extend) as store:
        assert store.recover() == []
        put(store, 1, 2)
        store.demote([2])
        assert lost == [2] and not store.contains(2) and store.flush()
        assert whole(store, 1) and not whole(store, 2)


def test_a_full_arena_takes_no_more() -> None:
    with opened(SMALL, 2) as store:
        slots = store.reserve(3)
        assert len(slots) == 2 and store.reserve(1) == []
        assert not store.put(1, None, content(1, SMALL))
        store.give_back(slots)
        put(store, 1, 2)
        assert not store.put(3, 2, content(3, SMALL))
        store.drop([1])
        put(store, 3)


@pytest.mark.parametrize("ends", ["drop", "demote"])
def test_a_pinned_block_stays_until_it_is_unpinned(ends: str, tmp_path: Path) -> None:
    with opened(SMALL, 1, tmp_path) as store:
        put(store, 1)
        store.flush()
        first, missing = store.pin([1, 2])
        (second,) = store.pin([1])
        assert first is not None and second is not None and missing is None
        getattr(store, ends)([1])
        assert store.reserve(1) == [] and store.pin([1]) == [None] and whole(store, 1) == (ends == "demote")
        assert bytes(store.arena.slot(first.slot)) == content(1, SMALL)
        store.unpin([first])
        assert store.reserve(1) == []
        store.unpin([second])
        assert store.reserve(1) == [first.slot]


@SHAPES
def test_a_block_comes_back_to_dram(shape: Shape, tmp_path: Path) -> None:
    with opened(shape, 1, tmp_path) as store:
        put(store, 1)
        store.flush()
        store.demote([1])
        (slot,) = store.reserve(1)
        assert store.read(1, 0, shape.num_layers, store.arena.slot(slot))
        seals = store.seals(1)
        assert seals == seals_of(content(1, shape), shape)
        store.commit(1, None, slot, seals)
        assert store.tier(1) is Tier.MEMORY and store.stat().queued_blocks == 0
        store.demote([1])  # free, its record was kept
        assert store.reserve(1) == [slot]


def test_reading_what_is_gone_says_so(tmp_path: Path) -> None:
    lost: list[BlockName] = []
    with opened(SMALL, 1, tmp_path, on_lost=lost.extend) as store:
        assert not store.read(9, 0, 3, room(SMALL)) and lost == [9]
        store.demote([8])
        assert lost == [9, 8]
        assert not store.get(9, room(SMALL)) and lost == [9, 8]
        store.drop([7])
        store.drop([7])
        assert lost == [9, 8]


def test_a_block_that_moves_while_it_is_read_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place went to another block."""
    lost: list[BlockName] = []
    with opened(SMALL, 4, tmp_path / "log", on_lost=lost.extend) as store:
        put(store, 1)
        store.flush()
        store.demote([1])
        read, moved = store._reader.read, list[int]()

        def once(sources: Any) -> Any:
            faults = read(sources)
            if not moved:
                moved.append(1)
                store.drop([1])
                put(store, 1)
                return [Fault.DAMAGED for _ in faults]
            return faults

        monkeypatch.setattr(store._reader, "read", once)
        assert whole(store, 1)
        assert not lost and store.stat().seal_mismatches == 0


def test_a_log_full_of_demoted_blocks_loses_the_next(tmp_path: Path) -> None:
    lost: list[BlockName] = []
    with opened(SMALL, 4, tmp_path / "log", log_bytes(SMALL, 2, tmp_path), on_lost=lost.extend) as store:
        put(store, 1, 2, 3, 4)
        store.flush()
        assert store.stat().queued_blocks == 2  # no room for them behind the first two
        store.demote([3, 4])  # the shadows of 1 and 2 give way
        store.flush()
        assert lost == [] and whole(store, 3) and whole(store, 4)
        store.demote([1])
        store.flush()
        assert lost == [1] and whole(store, 2)
        store.drop([3])
        store.flush()
        store.demote([2])
        assert store.stat().memory.used_bytes == 0 and lost == [1]


def test_after_a_restart_blocks_without_their_head_are_not_offered(tmp_path: Path) -> None:
    capacity = log_bytes(SMALL, 3, tmp_path)
    with opened(SMALL, 5, tmp_path / "log", capacity) as store:
        put(store, 1, 2, 3)
        store.flush()
        store.put(10, None, content(10, SMALL))
        store.demote([10])  # takes the place of block 1, the oldest shadow
        store.flush()
    with opened(SMALL, 5, tmp_path / "log", capacity) as store:
        assert store.recover() == [(10, None)]
        assert store.stat().disk.num_blocks == 1


def test_figures(tmp_path: Path) -> None:
    size = SMALL.block_bytes
    with opened(SMALL, 4, tmp_path, 1 << 20) as store:
        put(store, 1, 2, 3)
        store.flush()
        store.demote([1])
        whole(store, 1), whole(store, 2), whole(store, 4)
        store.drop([3])
        (pinned,) = store.pin([2])
        store.reserve(1)
        stat = store.stat()
        assert stat.memory.capacity_bytes == 4 * size and stat.memory.used_bytes == 2 * size
        assert (stat.memory.num_blocks, stat.disk.num_blocks) == (1, 2)
        assert (stat.memory.hits, stat.disk.hits, stat.misses) == (2, 1, 1)
        assert (stat.memory.bytes_in, stat.disk.bytes_in) == (3 * size, 3 * size)
        assert (stat.memory.bytes_out, stat.disk.bytes_out) == (2 * size, size)
        assert (stat.memory.evictions, stat.disk.evictions) == (2, 1)
        assert (stat.num_pinned, stat.num_reserved, stat.queued_blocks) == (1, 1, 0)
        assert stat.file_bytes <= stat.disk.capacity_bytes == 1 << 20
        assert stat.disk.used_bytes < stat.file_bytes
        assert not (stat.degraded or stat.io_errors or stat.seal_mismatches or stat.lost_blocks)
        assert pinned is not None
        store.unpin([pinned])


def test_names_of_a_model_and_of_a_trace(tmp_path: Path) -> None:
    names: list[BlockName] = [bytes(range(16)), 17, -1, b""]
    with opened(SMALL, 4, tmp_path) as store:
        for name in names:
            store.put(name, names[0] if name != names[0] else None, content(3, SMALL))
        with pytest.raises(ValueError, match="at most"):
            store.put(bytes(33), None, content(3, SMALL))
        store.give_back([])
    with opened(SMALL, 4, tmp_path) as store:
        assert {name for name, _ in store.recover()} == set(names)


class Flaky(FaultyFiles):
    """One in four calls fails."""

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(1)

    def _call(self, method: str) -> None:
        if self.begun and self._random.random() < 0.25:
            raise OSError(errno.EIO, method)


@pytest.mark.parametrize("files", [FaultyFiles(), Flaky()], ids=["sound", "flaky"])
def test_threads_do_what_they_like(files: FaultyFiles, tmp_path: Path) -> None:
    """Never a wrong byte, and nothing left at the end."""
    shape, wrong, capacity = LARGE, [], log_bytes(LARGE, 12, tmp_path)

    def work(seed: int) -> None:
        random, into = Random(seed), room(shape)
        for _ in range(150):
            name = random.randrange(16)
            action = random.random()
            if action < 0.3:
                store.put(name, None, content(name, shape))
            elif action < 0.6:
                if store.get(name, into) and into != content(name, shape):
                    wrong.append(name)
            elif action < 0.75:
                store.demote([name])
            elif action < 0.9:
                for pinned in filter(None, store.pin([name])):
                    if bytes(store.arena.slot(pinned.slot)) != content(name, shape):
                        wrong.append(name)
                    store.unpin([pinned])
            else:
                store.drop([name])

    with opened(shape, 10, tmp_path / "log", capacity, files=files) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store.drop(range(16))
        store.flush()
        stat = store.stat()
        assert wrong == [] and stat.seal_mismatches == 0
        assert isinstance(files, Flaky) or stat.io_errors == 0
        assert stat.memory.used_bytes == stat.disk.used_bytes == stat.num_pinned == 0


def test_closing_leaves_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    with opened(SMALL, 2, tmp_path) as store:
        put(store, 1, 2)
        store.get_many([(1, room(SMALL)), (2, room(SMALL))])
    assert descriptors() <= before and set(threading.enumerate()) <= threads
    store.close()
    assert not store.get(1, room(SMALL))


def test_a_disk_that_does_not_answer_does_not_hold_up_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.live.store.store._CLOSE_S", 0.05)
    asked, answers = threading.Event(), threading.Event()

    class Slow(Files):
        def sync(self, fd: int) -> None:
            asked.set()
            answers.wait()

    with opened(SMALL, 1, tmp_path, files=Slow()) as store:
        put(store, 1)
        assert asked.wait(60)
    assert store.arena.slot(0), "memory that is being written stays"
    answers.set()
