"""`isthmus bench` of moving and keeping bytes, as a user runs it, on a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.models import make_model

KIB = 1024


@pytest.fixture(autouse=True)
def no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.bench.messenger.SAMPLE_BYTES", 1)


def test_messenger(isthmus: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = "--sizes 64KiB --pieces 4KiB,48KiB,128KiB --connections 2 --rounds 1 --pings 2".split()
    for direction in ("push", "pull"):
        status, out, err = isthmus("bench", "messenger", *options, "--direction", direction, "--json", file)
        assert status == 0 and err.startswith("size 64 KiB, pieces 4 KiB, connections 2, isthmus ")
        assert f"{direction}, GB/s" in out and "P99 ms" in out and "/ socket" in out
        rows = json.loads(file.read_text())
        cases = [(row["size"], row["pieces"], row["connections"]) for row in rows]
        assert cases == [(64 * KIB, piece * KIB, 2) for piece in (4, 48)]
        assert all(min(row["isthmus"], row["socket"], row["memcpy"]) > 0 for row in rows)


def test_store(isthmus: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--sizes", "16KiB,64KiB", "--total", "128KiB", "--rounds", 1, "--folder", tmp_path)
    status, out, err = isthmus("bench", "store", *options, "--json", file)
    assert status == 0 and len(err.splitlines()) == 8
    assert "| put" in out and "| ssd" in out
    rows = json.loads(file.read_text())
    assert [(row["size"] // KIB, row["tier"], row["operation"]) for row in rows] == [
        (size, tier, operation) for size in (16, 64) for tier in ("dram", "ssd") for operation in ("put", "get")
    ]
    for row in rows:
        sides = {side for side, speed in list(row.items())[3:] if speed > 0}
        assert sides == {"isthmus", "batched", "memcpy" if row["tier"] == "dram" else "file"}
    assert not list(tmp_path.glob("isthmus-bench-*")), "nothing is left on the disk"


def test_policies(isthmus: Command, tmp_path: Path) -> None:
    workload = "poisson:rate=4,num=60,input=3000,output=20,prefixes=5,prefix_tokens=4096"
    options = ("--nodes", 2, "--speeds", 1, "--links", "1.3,12", "--policies", "sticky,mooncake-1,isthmus")
    for name in ("one.json", "two.json"):
        status, out, _ = isthmus("bench", "policies", "--trace", workload, *options, "--json", tmp_path / name)
        assert status == 0 and "Placement alone" in out and "2 cells" in out
    found = json.loads((tmp_path / "one.json").read_text())
    assert [cell["link_bytes_per_s"] for cell in found["cells"]] == [1_300_000_000, 12_000_000_000]
    assert found["totals"]["alone"]["cells"] == 2
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("messenger", ("--direction", "up"), "--direction up: known are push, pull"),
        ("messenger", ("--sizes", "1MiB,x"), "'x' is not a size"),
        ("messenger", ("--sizes", "0"), "--sizes 0: 0 is no size"),
        ("messenger", ("--connections", "0"), "--connections 0: must be 1 or more"),
        ("reuse", ("--model", "tests", "--texts", "/no/texts"), "--texts /no/texts: no such folder"),
        ("policies", ("--trace", "poisson:rate=1", "--seeds", "x"), "--seeds x: expected numbers"),
        ("policies", ("--trace", "poisson:rate=1", "--ssd", "1XB"), "--ssd: '1XB' is not a size"),
        ("store", ("--sizes", "100"), "multiples of 16"),
        ("store", ("--folder", "/no/folder"), "/no/folder: is no folder"),
        ("store", ("--json", "/no/rows.json"), "--json /no/rows.json: no folder"),
    ],
)
def test_bad_options_give_one_line(isthmus: Command, command: str, options: tuple[str, str], said: str) -> None:
    status, _, err = isthmus("bench", command, *options)
    assert status == 2 and said in err and "Traceback" not in err


def test_reuse_of_a_model_that_cannot_gives_one_line(isthmus: Command, tmp_path: Path) -> None:
    make_model(tmp_path, "mistral", sliding_window=40)
    status, _, err = isthmus("bench", "reuse", "--model", tmp_path)
    assert status == 1 and "prompts of this model are not assembled: " in err and "Traceback" not in err
