"""A study as a user runs it, but in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import app
from benchmarks.models import make_random_model
from isthmus.cli.main import main

Study = Callable[..., tuple[Any, str]]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Study:
    """`study("wan", "--rounds", 1)` returns what it wrote as JSON, and its standard output; with `status=2` nothing,
    and the line that it says on standard error."""

    def run(*arguments: object, status: int = 0) -> tuple[Any, str]:
        file = tmp_path / "found.json"
        options = [] if status else ["--json", str(file)]
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments), *options])
        with pytest.raises(SystemExit) as exit:
            main(app)
        said = capsys.readouterr()
        assert int(exit.value.code or 0) == status, said.err
        if status:
            assert "Traceback" not in said.err
            return None, said.err
        return json.loads(file.read_text()), said.out

    return run


def program(file: Path, command: object) -> str:
    """A program of this name: this Python with the command, and what else it is told."""
    file.write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_random_model(folder, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, dtype="bfloat16")
    return folder
