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
    options = ("--sizes", "64KiB", "--pieces", "16KiB", "--connections", "2", "--rounds", 1, "--pings", 2)
    status, out, err = isthmus("bench", "messenger", *options, "--direction", "pull", "--json", file)
    assert status == 0 and err.startswith("size 64 KiB, pieces 16 KiB, connections 2, isthmus ")
    assert "pull, GB/s" in out and "P99 ms" in out
    [row] = json.loads(file.read_text())
    assert (row["size"], row["pieces"], row["connections"]) == (64 * KIB, 16 * KIB, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--direction", "up"), "--direction up: known are push, pull"),
        (("--sizes", "1MiB,x"), "'x' is not a size"),
        (("--sizes", "0"), "--sizes 0: 0 is no size"),
        (("--connections", "0"), "--connections 0: must be 1 or more"),
    ],
)
def test_bad_messenger_options_give_one_line(isthmus: Command, options: tuple[str, str], said: str) -> None:
    status, _, err = isthmus("bench", "messenger", *options)
    assert status == 2 and said in err and "Traceback" not in err


def test_store(isthmus: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--sizes", "16KiB", "--total", "64KiB", "--rounds", 1, "--folder", tmp_path)
    status, out, err = isthmus("bench", "store", *options, "--json", file)
    assert status == 0 and len(err.splitlines()) == 4
    assert "| put" in out and "| ssd" in out
    assert [(row["operation"], row["tier"]) for row in json.loads(file.read_text())] == [
        ("put", "dram"),
        ("get", "dram"),
        ("put", "ssd"),
        ("get", "ssd"),
    ]


def test_policies(isthmus: Command, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    workload = "poisson:rate=4,num=60,input=3000,output=20,prefixes=5,prefix_tokens=4096"
    options = ("--nodes", 2, "--speeds", 1, "--links", 3, "--policies", "sticky,isthmus", "--json", file)
    status, out, _ = isthmus("bench", "policies", "--trace", workload, *options)
    assert status == 0 and "Placement alone" in out
    assert json.loads(file.read_text())["cells"][0]["verdict_alone"]["best"] == "sticky"


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
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


def test_reuse_without_texts_gives_one_line(isthmus: Command, tmp_path: Path) -> None:
    status, _, err = isthmus("bench", "reuse", "--model", tmp_path, "--texts", tmp_path / "none")
    assert status == 2 and f"--texts {tmp_path / 'none'}: no such folder" in err and "Traceback" not in err


def test_reuse_of_a_model_that_cannot_gives_one_line(isthmus: Command, tmp_path: Path) -> None:
    make_model(tmp_path, "mistral", sliding_window=40)
    status, _, err = isthmus("bench", "reuse", "--model", tmp_path)
    assert status == 1 and "prompts of this model are not assembled: " in err and "sliding windows" in err
    assert "Traceback" not in err
