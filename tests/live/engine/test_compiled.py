from __future__ import annotations

import logging
from pathlib import Path

import pytest

from isthmus.live.engine import compiled

FLAGS = ("-O1", "-fPIC", "-shared")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(compiled, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "answer.c", tmp_path / "number.h"]
    paths[0].write_text('#include "number.h"\nint answer(void) { return NUMBER; }\n')
    paths[1].write_text("#define NUMBER 42\n")
    return paths


def test_a_file_is_built_once_and_again_when_what_it_includes_changes(sources: list[Path], cache: Path) -> None:
    for _ in range(2):
        found = compiled.library(sources, FLAGS, "")
        assert found is not None and found.answer() == 42
        assert len(list((cache / "kernels").iterdir())) == 1
    sources[1].write_text("#define NUMBER 43\n")
    found = compiled.library(sources, FLAGS, "")
    assert found is not None and found.answer() == 43
    assert len(list((cache / "kernels").iterdir())) == 2


def test_what_cannot_be_built_is_one_warning_that_names_what_is_used_instead(
    sources: list[Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources[1].write_text("")
    with caplog.at_level(logging.WARNING):
        assert compiled.library(sources, FLAGS, "sums are done by hand") is None
    (record,) = caplog.records
    assert "answer.c could not be built: sums are done by hand" in record.getMessage()
    assert not list((cache / "kernels").iterdir()), "a half-made library was left"
