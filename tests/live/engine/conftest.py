from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isthmus.live.engine.kernels import Kernels, native
from isthmus.live.engine.kernels.plain import PlainKernels
from tests.models import MODEL_CASES, make_model

from .hybrids import FAMILIES, save_tiny

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a model case or of a family of `hybrids.py`, made when first asked for. Read only: copy it to
    change it."""
    root = tmp_path_factory.mktemp("models")

    def folder_of(case: str) -> Path:
        folder = root / case
        if not folder.exists() and case in FAMILIES:
            save_tiny(case, folder)
        elif not folder.exists():
            family, overrides = MODEL_CASES[case]
            make_model(folder, family, **overrides)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def native_kernels() -> Kernels:
    """A C compiler is a stated prerequisite: without one these tests fail, they are not skipped."""
    kernels = native.load()
    assert kernels is not None, "the native kernels could not be built: is gcc installed?"
    return kernels


@pytest.fixture(params=["plain", "native"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return PlainKernels() if request.param == "plain" else request.getfixturevalue("native_kernels")


@pytest.fixture
def selected(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Engines compute with these."""
    monkeypatch.setattr("isthmus.live.engine.kernels.select", lambda device: kernels)
    return kernels
