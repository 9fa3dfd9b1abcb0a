"""Commands of studies: those that the documentation names are there, and a mistake is one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from benchmarks.__main__ import STUDIES
from benchmarks.__main__ import app as benchmarks
from isthmus.cli.main import app as isthmus
from tests.benchmarks.conftest import Study

ROUTING = ("vllm-routing", "--model", "m", "--vllm-python", "p", "--trace", "t", "--folder", "f")
ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
QUOTED = {
    "benchmarks": re.compile(r"python -m benchmarks ([a-z][a-z-]*)"),
    "bench": re.compile(r"isthmus bench ([a-z][a-z-]*)"),
}


def commands(app: typer.Typer) -> dict[str, object]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    bench = commands(isthmus)["bench"]
    assert isinstance(bench, typer.core.TyperGroup)
    return {"benchmarks": set(commands(benchmarks)), "bench": set(bench.commands)}


@pytest.mark.parametrize("group", QUOTED)
def test_quoted_commands_are_known(group: str, known: dict[str, set[str]]) -> None:
    quoted = {name: file.name for file in DOCUMENTS for name in QUOTED[group].findall(file.read_text("utf8"))}
    assert quoted and {name: file for name, file in quoted.items() if name not in known[group]} == {}


def test_every_study_has_options_of_its_plan(known: dict[str, set[str]]) -> None:
    assert set(STUDIES) | {"make-model", "unpack-model"} == known["benchmarks"]
    for name, command in commands(benchmarks).items():
        options = {option for each in command.params for option in each.opts}  # type: ignore[attr-defined]
        assert name not in STUDIES or "--json" in options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("wan", "--window", "1MiBB"), "--window: '1MiBB' is not a size"),
        (("wan", "--rates", "0"), "--rates and --seconds: must be above 0"),
        (("wan", "--json", "/no/rows.json"), "--json /no/rows.json: no folder"),
        (("conductor", "--policy", "best"), "--policy best: known are "),
        (("conductor", "--blocks", "1000"), "--blocks 1000: at least ten prompts, 2500"),
        (("messenger", "--sizes", "0"), "--sizes 0: 0 is no size"),
        (("cost", "--profiles", "/no"), "profiles folder /no: no file "),
        (("serving", "--model", "m", "--vllm-python", "p", "--folder", "f", "--gguf", "x"), "go together"),
        (("vllm-faults", "http://localhost:1", "--model", "m", "--kinds", "socket+sokket"), "known are prefill-"),
        (("vllm-faults", "http://localhost:1", "--model", "m", "--kinds", "disk"), "--disk says where"),
        ((*ROUTING, "--sides", "proxy"), "--proxy"),
        ((*ROUTING, "--sides", "udp/isthmus"), "udp/isthmus is neither"),
        (("make-model", "f", "--preset", "big"), "--preset big: known are "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, study: Study) -> None:
    _, line = study(*arguments, status=2)
    assert said in line
