"""One entry for all sources: what tells them apart, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import Replay, lines, load
from tests.lab.sim.workloads.trace import line, write

PLAIN = "poisson:rate=8,num=20,input=10,output=5"


def test_a_trace_is_known_by_its_first_line_whatever_it_is_called(tmp_path: Path) -> None:
    assert load(write(tmp_path / "mooncake", [line(0, 5, 1, [0])])).requests[0].num_tokens == 5
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,6,1"]
    assert load(write(tmp_path / "azure", azure)).requests[0].num_tokens == 6


def test_a_specification_is_a_source_too() -> None:
    requests = load(PLAIN).requests
    assert len(requests) == 20
    fast = load(PLAIN, Replay(speed=2.0, limit=5)).requests
    assert [each.arrival_ns for each in fast] == [round(each.arrival_ns / 2) for each in requests[:5]]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("notes.txt", "hello\n", r"no workload; expected a Mooncake trace .* Azure trace .* poisson"),
        ("notes.txt", "a,b,c\n1,2,3\n", r"no workload; expected a Mooncake trace .* Azure trace .* poisson"),
        *((f"empty.{kind}", "\n\n", "empty") for kind in ("jsonl", "csv", "txt")),
        ("gone.jsonl", None, r"gone\.jsonl: cannot be read: No such file"),
        ("", None, "cannot be read: Is a directory"),
    ],
)
def test_what_is_no_workload_is_refused(tmp_path: Path, name: str, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path / name)


def test_a_misspelt_generator_is_not_taken_for_a_file() -> None:
    with pytest.raises(ConfigError, match="'poison' are not known; known: poisson, gamma, even"):
        load("poison:rate=8,num=1")


def test_options_that_a_source_has_no_use_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="exact"):
        load(PLAIN, Replay(spread_seed=1))


TEXT = (line(0, 5, 1, [0]) + "\n" + line(1, 6, 1, [0]) + "\n").encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.jsonl", b"\xef\xbb\xbf" + TEXT),
        ("t.jsonl", TEXT.decode().encode("utf-16")),
        ("t.jsonl", b"\r\n" + TEXT.replace(b"\n", b"\r\n")),
        ("t.jsonl.gz", gzip.compress(TEXT, mtime=0)),
        ("t", gzip.compress(b"\xef\xbb\xbf" + TEXT, mtime=0)),
    ],
)
def test_a_file_is_read_however_it_was_saved(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    workload = load(tmp_path / name)
    assert [each.num_tokens for each in workload.requests] == [5, 6]
    assert (workload.name, workload.notes) == ("t", ())


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (gzip.compress(TEXT, mtime=0)[:-9], "packed by gzip, but damaged"),
        (gzip.compress(TEXT, mtime=0)[:12] + b"\xff" * 40, "packed by gzip, but damaged"),
        (b"PK\x03\x04rest", "is packed by zip; unpack it, or pack it by gzip"),
        (b"\x28\xb5\x2f\xfdrest", "is packed by zstd"),
        (b"\xff\xfe\x00", "begins as UTF-16, but is none"),
        (gzip.compress(b"x" * 5000, mtime=0), "unpacks to more than"),
    ],
)
def test_a_file_that_cannot_be_unpacked_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, complaint: str
) -> None:
    monkeypatch.setattr(lines, "MAX_UNPACKED", 4096)
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(path)
    assert "\n" not in str(caught.value)
