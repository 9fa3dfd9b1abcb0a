"""The pure rooms stay pure: no torch, no clock, no I/O, quick to load. And nobody executes data."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "isthmus"
PURE = ("blocks", "conductor", "scheduler", "types", "errors")
IMPURE = {"torch", "time", "random", "socket", "asyncio", "logging", "threading", "os"}
SOURCES = sorted(SRC.rglob("*.py"))


def files_of(room: str) -> list[Path]:
    folder = SRC / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [SRC / f"{room}.py"]


def imports_of(tree: ast.AST) -> set[str]:
    """Top-level packages a file imports, wherever in it; what is imported for typing counts."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and called(node) in ("__import__", "importlib.import_module"):
            found.add("a name computed at run time")
    return found


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def dangers_of(tree: ast.AST) -> Iterator[str]:
    for forbidden in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
        if forbidden in imports_of(tree):
            yield f"imports {forbidden}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ("eval", "exec", "torch.load", "yaml.load"):
            yield f"line {node.lineno}: calls {called(node)}"
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "yaml"):
            yield from (f"line {node.lineno}: imports load" for alias in node.names if alias.name == "load")


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_imports_no_clock_chance_or_io(room: str) -> None:
    for path in files_of(room):
        assert not imports_of(ast.parse(path.read_text())) & IMPURE, path


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SRC)))
def test_no_file_executes_data(path: Path) -> None:
    assert list(dangers_of(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import time", "time"),
        ("from os.path import join", "os"),
        ("def f():\n    import asyncio.events", "asyncio"),
        ("if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
        ("__import__(name)", "a name computed at run time"),
    ],
)
def test_the_import_check_would_find(code: str, found: str) -> None:
    assert found in imports_of(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    ["eval(x)", "def f():\n    exec(x)", "import pickle", "from marshal import loads", "torch.load(f)",
     "yaml.load(f)", "from yaml import load"],
)  # fmt: skip
def test_the_danger_check_would_find(code: str) -> None:
    assert len(list(dangers_of(ast.parse(code)))) == 1


def test_words_that_only_look_dangerous_are_allowed() -> None:
    assert list(dangers_of(ast.parse("model.eval()\nyaml.safe_load(f)\njson.load(f)\n'eval(x)'"))) == []


def test_the_package_and_pure_rooms_load_no_torch() -> None:
    rooms = ["isthmus", *(f"isthmus.{room}" for room in PURE)]
    heavy = {"torch", "numpy", "pydantic", "starlette", "isthmus.config"}
    code = f"import sys, {', '.join(rooms)}; print(sorted(set(sys.modules) & {heavy!r}))"
    assert python(code) == "[]"


@pytest.mark.parametrize("room", ["isthmus", *(f"isthmus.{room}" for room in PURE)])
def test_a_pure_room_loads_in_well_under_300_ms(room: str) -> None:
    """A stated requirement, so it is measured: the best of five fresh interpreters, less their own start."""
    code = f"import time; start = time.perf_counter(); import {room}; print(time.perf_counter() - start)"
    assert min(float(python(code)) for _ in range(5)) < 0.3


def test_rooms_import_only_what_the_design_allows() -> None:
    """The contracts are in pyproject.toml, where import-linter reads them."""
    lint = Path(sys.executable).parent / "lint-imports"
    command = [str(lint), "--no-cache", "--config", str(SRC.parent.parent / "pyproject.toml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=SRC.parent.parent)
    assert result.returncode == 0, result.stdout + result.stderr
