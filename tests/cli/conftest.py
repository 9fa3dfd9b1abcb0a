"""The command as a user runs it, but in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from isthmus.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def isthmus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`isthmus("simulate", ...)` returns exit status, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["isthmus", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    return run
