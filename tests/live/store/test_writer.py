"""Disks that are full, broken or lying: the store goes on in DRAM and comes back by itself."""

from __future__ import annotations

import errno
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus.core.types import BlockName
from isthmus.live.store.record import GROUP
from isthmus.live.store.writer import Retry
from tests.live.store.support import LARGE, SMALL, FaultyFiles, log_bytes, opened, put, whole


def wait_for(store: object, healthy: bool) -> None:
    """Returns when the store is (not) degraded; the test's time limit ends a wait in vain."""
    while store.stat().degraded is healthy:  # type: ignore[attr-defined]
        time.sleep(0.0005)


@pytest.mark.parametrize("method", ["write", "sync", "allocate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_failing_disk_leaves_dram_and_comes_back(method: str, number: int, tmp_path: Path) -> None:
    files, lost = FaultyFiles(), list[BlockName]()
    with opened(SMALL, 8, tmp_path, files=files, on_lost=lost.extend) as store:
        files.broken[method] = number
        put(store, 1, 2, 3)
        wait_for(store, healthy=False)
        assert store.flush(), "nothing to wait for"
        assert all(whole(store, name) for name in (1, 2, 3))
        store.demote([2])
        store.flush()
        assert lost == [2] and not store.contains(2)
        stat = store.stat()
        assert stat.io_errors >= 1 and stat.disk.num_blocks == 0 and stat.lost_blocks == 1
        store.check()
        files.broken.clear()
        wait_for(store, healthy=True)
        store.flush()
        assert store.stat().queued_blocks == 0, "what waited in DRAM is written now"
        store.demote([1, 3])
        assert lost == [2] and whole(store, 1) and whole(store, 3)


@pytest.mark.parametrize("how", ["a failed sync", "a write that took only a part"])
def test_of_a_batch_that_failed_nothing_counts(how: str, tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(SMALL, 4, tmp_path, files=files) as store:
        put(store, 1)
        store.flush()
        files.sleeps.clear()
        files.short = how != "a failed sync"
        files.broken = {} if files.short else {"sync": errno.EIO}
        put(store, 2, 3)
        wait_for(store, healthy=False)
        files.short = False
        files.broken.clear()
        assert store.stat().disk.num_blocks == 1 and store.stat().queued_blocks == 2
        files.sleeps.set()
        wait_for(store, healthy=True)
        store.flush()
        store.demote([1, 2, 3])
        assert all(whole(store, name) for name in (1, 2, 3))


def test_what_is_on_a_failing_ssd_can_still_be_read(tmp_path: Path) -> None:
    files = FaultyFiles()
    with opened(LARGE, 4, tmp_path, files=files) as store:
        put(store, 1, 2)
        store.flush()
        store.demote([1])
        files.broken = {"write": errno.EIO, "sync": errno.EIO}
        put(store, 3)
        wait_for(store, healthy=False)
        store.demote([2])
        assert whole(store, 1) and whole(store, 2) and whole(store, 3)
        files.broken.clear()


def test_demoted_blocks_in_the_queue_are_lost_with_the_disk(tmp_path: Path) -> None:
    files, lost = FaultyFiles(), list[BlockName]()
    with opened(SMALL, 40, tmp_path, files=files, on_lost=lost.extend) as store:
        files.broken["sync"] = errno.EIO
        files.sleeps.clear()
        put(store, *range(40))
        store.demote(range(40))
        wait_for(store, healthy=False)
        store.flush()  # what is lost is told after it is known that the disk fails
        store.demote([39])
        assert sorted(map(int, lost)) == sorted([*range(40), 39])
        assert store.stat().memory.used_bytes == 0
        files.broken.clear()


def test_a_full_disk_still_takes_what_fits_into_the_files_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.live.store.log.SEGMENT_BYTES", 1)
    files, lost = FaultyFiles(), list[BlockName]()
    capacity = log_bytes(SMALL, 2 * GROUP, tmp_path)
    with opened(SMALL, 24, tmp_path / "log", capacity, files=files, on_lost=lost.extend) as store:
        put(store, *range(GROUP))
        store.flush()
        files.broken["allocate"] = errno.ENOSPC
        put(store, 101, 102)
        wait_for(store, healthy=False)
        store.drop([0])
        store.flush()
        assert store.stat().disk.num_blocks == GROUP and store.stat().degraded
        store.demote([102])  # in the place of a shadow
        store.flush()
        assert lost == [] and whole(store, 102)
        files.broken.clear()
        wait_for(store, healthy=True)
        store.flush()
        assert store.stat().queued_blocks == 0 and store.stat().disk.num_blocks == GROUP + 1


def test_an_unreadable_block_is_lost_alone(tmp_path: Path) -> None:
    files, lost = FaultyFiles(), list[BlockName]()
    with opened(LARGE, 4, tmp_path, files=files, on_lost=lost.extend) as store:
        put(store, 1, 2)
        store.flush()
        store.demote([1, 2])
        files.broken["read"] = errno.EIO
        assert not whole(store, 1)
        files.broken.clear()
        assert lost == [1] and whole(store, 2) and store.stat().io_errors == 1


@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_a_folder_that_vanishes_leaves_what_is_open_and_dram(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not injected."""
    monkeypatch.setattr("isthmus.live.store.log.SEGMENT_BYTES", 1)
    folder, lost, names = tmp_path / "log", list[BlockName](), range(3 * GROUP)
    with opened(
        SMALL, len(names), folder, log_bytes(SMALL, len(names), tmp_path), on_lost=lost.extend
    ) as store:
        put(store, *names[:GROUP])
        store.flush()
        shutil.rmtree(folder)
        if there == "a file":
            folder.write_text("somebody's")
        put(store, *names[GROUP:])
        wait_for(store, healthy=False)
        store.flush()
        assert all(whole(store, name) for name in names) and store.stat().disk.num_blocks == GROUP
        store.demote(names[:GROUP])
        assert all(whole(store, name) for name in names) and lost == []
    assert there == "nothing" or folder.read_text() == "somebody's"


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_any_one_call_may_fail(shape: object, tmp_path: Path) -> None:
    """The first, the second, the third ... call of the same story fails, until none does."""
    at = 0
    while True:
        files, lost = FaultyFiles(), list[BlockName]()
        files.fail_at = at
        with opened(SMALL, 3, tmp_path / str(at), files=files, on_lost=lost.extend) as store:
            for name in range(5):
                put(store, name)
                store.flush()
                store.demote([name])
                store.flush()
                assert whole(store, name) or lost
            store.drop([1])
            put(store, 7)
            store.flush()
            here = sum(whole(store, name) for name in (0, 2, 3, 4, 7))
            assert here + len(set(lost) - {1}) == 5
        if files.fail_at >= len(files.calls):
            break
        at += 1
    assert at >= 15


def test_retries_wait_twice_as_long_each_time() -> None:
    retry, now, waits = Retry(), 0.0, []
    for _ in range(9):
        retry.failed(now)
        waits.append(retry.at_s - now)
        now = retry.at_s
        retry.resume()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not retry.failing
    retry.worked()
    retry.failed(0.0)
    assert retry.at_s == 1.0


FULL = """
import resource, sys, time
from tests.live.store.support import LARGE, opened, put, whole
from isthmus.live.store import Log
size = Log(sys.argv[1] + "/measure", LARGE, 1 << 30, b"").format.file_bytes(12)
limit = size // 2
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
with opened(LARGE, 12, sys.argv[1] + "/log", size) as store:
    put(store, *range(12))
    while not store.stat().degraded:
        pass
    assert store.flush() and all(whole(store, name) for name in range(12))
    assert store.stat().disk.num_blocks == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while store.stat().degraded:
        time.sleep(0.01)
    store.flush()
    assert store.stat().disk.num_blocks == 12
    store.demote(range(12))
    assert all(whole(store, name) for name in range(12))
print("well")
"""


def test_a_limit_of_the_system_on_file_sizes(tmp_path: Path) -> None:
    """Not injected: the kernel refuses to make the file larger, then allows it."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "well\n", shown.stderr
