"""The bare package does without what computes: real commands in processes that have none of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from isthmus.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPUTING = ("torch", "safetensors", "gguf", "llguidance", "transformers")
ABSENT = f"import sys; sys.modules.update(dict.fromkeys({COMPUTING}))\n"
"""To import one of them raises ModuleNotFoundError then, as if it were not installed."""
MAIN = "from isthmus.cli.main import main; main()"
EXAMPLES = ROOT / "examples"
WORKLOAD = "poisson:rate=5,num=20,input=1024,output=8"
NOWHERE = "http://127.0.0.1:9"
LOCK = (ROOT / "requirements.lock").read_text().splitlines()


def without_engine(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ABSENT + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("simulate", "--config", EXAMPLES / "mooncake-fast25.yaml", "--workload", WORKLOAD),
        ("plan", "--config", EXAMPLES / "plan/attention.yaml", "--lengths", 1155, "--output-tokens", 211),
        ("reproduce",),
        ("key", "acme"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_verb_that_computes_nothing_runs(arguments: tuple[object, ...]) -> None:
    done = without_engine(MAIN, *arguments)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "--url", NOWHERE), "nothing answers"),
        (("bench", "serve", "--url", NOWHERE), "does not answer"),
        (("replay", "none.jsonl"), "cannot be read"),
        (("serve",), "engine.kind: torch needs torch, which is not installed: pip install 'isthmus[engine]'"),
        (("profile", "--model", "src/isthmus/byte_tokenizer"), "pip install 'isthmus[engine]'"),
        (("bench", "attention"), "pip install 'isthmus[engine]'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_goes_wrong_is_one_line(arguments: tuple[object, ...], said: str) -> None:
    done = without_engine(MAIN, *arguments)
    assert done.returncode in (1, 2) and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_gateway_and_nodes_beside_servers_load_without_it() -> None:
    rooms = ("live.gateway.server", "live.servers.opening", "cli.engines", "bench.profile")
    done = without_engine("\n".join(f"import isthmus.{room}" for room in rooms))
    assert done.returncode == 0, done.stderr


def required(*extras: str) -> list[Requirement]:
    texts = [
        *PROJECT["dependencies"],
        *(each for extra in extras for each in PROJECT["optional-dependencies"][extra]),
    ]
    return [Requirement(text) for text in texts]


def test_an_extra_brings_what_is_said_to_be_missing() -> None:
    for extra in set(EXTRAS.values()):
        brought = {each.name for each in required(extra)} - {each.name for each in required()}
        assert brought == {package for package, by in EXTRAS.items() if by == extra}
    assert not {each.name for each in required()} & set(COMPUTING)


def test_what_make_installs_is_within_the_ranges() -> None:
    found = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in LOCK)  # type: ignore[union-attr]
    locked = {canonicalize_name(name): version for name, version in found.items()}
    (torch,) = re.findall(r"torch==(\S+)", (ROOT / "Makefile").read_text())
    for each in required("engine", "test"):
        version = (locked | {"torch": torch})[canonicalize_name(each.name)]
        assert each.specifier.contains(version), each
    assert "torch" not in locked
