from __future__ import annotations

import os
from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.store import Log, Shape
from isthmus.live.store.arena import aligned_buffer
from isthmus.live.store.log import Entry
from isthmus.live.store.record import GROUP, RecordHeader
from tests.live.store.support import LARGE, ODD, SMALL, content, log_bytes, room, seals_of

SHAPES = pytest.mark.parametrize("shape", [SMALL, LARGE, ODD], ids=["small", "large", "odd"])


def entry(log: Log, name: int, sequence: int = 1) -> Entry:
    """The next free place, for block `name`."""
    place = log.take()
    if place is None:
        log.grow()
        place = log.take()
    assert place is not None
    data = aligned_buffer(log.shape.block_bytes)
    data[:] = content(name, log.shape)
    return Entry(place, RecordHeader(name, None, seals_of(bytes(data), log.shape), sequence), data)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@SHAPES
@pytest.mark.parametrize("direct", [True, False])
def test_written_records_are_read_and_found_again(shape: Shape, direct: bool, tmp_path: Path) -> None:
    log = Log(tmp_path, shape, 1 << 24, b"", direct=direct)
    entries = [entry(log, name) for name in range(5)]
    log.write(entries[3:])
    log.write(entries[:3][::-1])
    log.sync([one.place for one in entries])
    log.close()

    log = Log(tmp_path, shape, 1 << 24, b"", direct=direct)
    assert log.scan() == [(one.place, one.header) for one in entries]
    for name, one in enumerate(entries):
        into = room(shape)
        assert log.read(one.place, 0, into) and into == content(name, shape)
        part = room(shape)[: shape.slice_bytes]
        assert log.read(one.place, shape.slice_bytes, part)
        assert part == content(name, shape)[shape.slice_bytes : 2 * shape.slice_bytes]
    log.close()


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_files_are_never_larger_than_the_capacity(num_blocks: int, tmp_path: Path) -> None:
    capacity = log_bytes(LARGE, num_blocks, tmp_path)
    log = Log(tmp_path / "log", LARGE, capacity, b"")
    assert log.used_bytes == size_of(tmp_path / "log") == 0
    log.write([entry(log, name) for name in range(num_blocks)])
    assert not log.can_grow and log.take() is None
    assert log.used_bytes == size_of(tmp_path / "log") == capacity
    log.close()
    with pytest.raises(ConfigError, match="hold no block"):
        Log(tmp_path / "log", LARGE, log.format.file_bytes(1) - 1, b"")


def test_a_smaller_capacity_cuts_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.live.store.log.SEGMENT_BYTES", 1)
    folder, num_blocks = tmp_path / "log", 3 * GROUP
    log = Log(folder, SMALL, log_bytes(SMALL, num_blocks, tmp_path), b"")
    log.write([entry(log, name) for name in range(num_blocks - 2)])
    assert len(list(folder.glob("blocks-*"))) == 3
    log.close()
    for kept in (num_blocks, 2 * GROUP + 1, 2 * GROUP, GROUP + 5, 3):
        capacity = log_bytes(SMALL, kept, tmp_path)
        log = Log(folder, SMALL, capacity, b"")
        assert size_of(folder) == log.used_bytes == capacity
        assert [place for place, _ in log.scan()] == list(range(min(kept, num_blocks - 2)))
        log.close()


def test_files_of_another_model_go_and_foreign_files_stay(tmp_path: Path) -> None:
    log = Log(tmp_path, SMALL, 1 << 20, b"one")
    log.write([entry(log, 1)])
    log.close()
    (tmp_path / "notes.txt").write_text("mine")
    log = Log(tmp_path, SMALL, 1 << 20, b"two")
    assert log.scan() == [] and log.used_bytes == 0
    assert sorted(os.listdir(tmp_path)) == ["lock", "notes.txt"]
    log.close()


def planted(path: Path, kind: str, precious: Path) -> None:
    """Something at `path` that no node made for this folder; `precious` is what a link leads to."""
    match kind:
        case "link":
            path.symlink_to(precious)
        case "second name":
            path.hardlink_to(precious)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "text":
            path.write_bytes(b"an archive of years\n" * 5000)


def segment_name(folder: Path, revision: bytes) -> str:
    """Of the first file for a model."""
    log = Log(folder, SMALL, 1 << 20, revision)
    log.write([entry(log, 1)])
    log.close()
    return next(path.name for path in folder.glob("blocks-*"))


@pytest.mark.parametrize("model", ["this", "another"])
@pytest.mark.parametrize("kind", ["link", "second name", "folder", "pipe", "text"])
def test_a_file_that_no_node_made_is_refused_and_left_alone(kind: str, model: str, tmp_path: Path) -> None:
    """A link to what another node keeps is one, too."""
    folder = tmp_path / "log"
    name = segment_name(tmp_path / "other", model.encode())
    precious = tmp_path / "other" / name
    folder.mkdir()
    planted(folder / name, kind, precious)
    before, kept = (folder / name).lstat(), precious.read_bytes()
    with pytest.raises(StartError, match=rf"SSD tier in {folder} cannot be used: {name}: ") as caught:
        Log(folder, SMALL, 1 << 20, b"this")
    assert "\n" not in str(caught.value)
    after = (folder / name).lstat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert precious.read_bytes() == kept


def test_a_file_that_no_node_made_is_not_grown_into(tmp_path: Path) -> None:
    name, folder = segment_name(tmp_path / "names", b""), tmp_path / "log"
    log = Log(folder, SMALL, 1 << 20, b"")
    (folder / name).write_text("an archive of years")
    with pytest.raises(OSError, match="is not of a node"):
        log.grow()
    assert (folder / name).read_text() == "an archive of years" and log.num_free == 0
    log.close()


@pytest.mark.parametrize("ending", ["", "/"])
def test_a_link_in_the_place_of_a_folder_is_refused_and_one_before_it_followed(
    ending: str, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    name = segment_name(tmp_path / "names", b"another")
    (tmp_path / "elsewhere" / name).write_text("an archive of years")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match=r"link cannot be used: is a symbolic link"):
        Log(f"{tmp_path}/link{ending}", SMALL, 1 << 20, b"")
    assert os.listdir(tmp_path / "elsewhere") == [name]
    Log(tmp_path / "link" / "prefill-0", SMALL, 1 << 20, b"").close()
    assert (tmp_path / "elsewhere" / "prefill-0").is_dir()


def test_a_lock_that_says_something_is_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711")
    with pytest.raises(StartError, match="cannot be used: lock: is not of a node"):
        Log(tmp_path, SMALL, 1 << 20, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(which: str, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    name = segment_name(folder, b"")
    os.chown(folder if which == "folder" else folder / name, 12345, -1)
    with pytest.raises(StartError, match=r"is nothing of this user's alone \(of user 12345\)"):
        Log(folder, SMALL, 1 << 20, b"")


def test_only_this_user_can_read_what_is_kept(tmp_path: Path) -> None:
    segment_name(tmp_path / "log", b"")
    found = [tmp_path / "log", *(tmp_path / "log").iterdir()]
    assert [oct(path.stat().st_mode & 0o077) for path in found] == ["0o0"] * 3


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    log = Log(tmp_path, SMALL, 1 << 20, b"")
    with pytest.raises(StartError, match="another node uses this folder"):
        Log(tmp_path, SMALL, 1 << 20, b"")
    log.close()
    Log(tmp_path, SMALL, 1 << 20, b"").close()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot be used"):
        Log(tmp_path / "file", SMALL, 1 << 20, b"")
