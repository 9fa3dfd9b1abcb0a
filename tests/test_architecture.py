"""docs/architecture.md says what is there: its paths, its reading order, its rooms, and its example in both worlds."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import LENDINGS, load_config
from isthmus.config import POLICIES as NAMES
from isthmus.core.attempts import Route
from isthmus.core.conductor import Conductor, NodeJoined, RequestArrived, Rules
from isthmus.core.conductor.lending import POLICIES as LENDING
from isthmus.core.conductor.policies import POLICIES
from isthmus.core.cost import Curve
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, RequestId, Role
from isthmus.facts.rules import make_known, rules_of
from tests.cli.conftest import isthmus as isthmus
from tests.parity.test_parity import COSTS, config_of, workload
from tests.parity.worlds import deployed, same_worlds
from tests.served import serve

from .cli.conftest import Command

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/isthmus"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf8")
EXAMPLE = ROOT / "examples/policies/thrifty.py"
THRIFTY = f"{EXAMPLE}:thrifty"
EMULATED = ("--engine", "emulated", "--hardware", "h200")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(title: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", section(title), re.M)


def test_every_path_is_there() -> None:
    paths = set(re.findall(r"`([\w./-]+/[\w.-]*\.py|[a-z]+/)`", PAGE))
    assert len(paths) > 60
    assert not [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    pages = re.findall(r"\]\(([\w-]+\.md)", PAGE)
    assert pages and all((ROOT / "docs" / page).exists() for page in pages)


def test_the_heart_is_six_files_away() -> None:
    files = first_column("Six files to the heart")
    assert len(files) <= 6
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in files) <= 2500


def test_rooms_are_those_whose_imports_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = set()
    for contract in contracts:
        if contract["type"] == "layers":
            (container,) = contract["containers"]
            wing = container.removeprefix("isthmus").removeprefix(".")
            names = [room.strip() for layer in contract["layers"] for room in layer.split("|")]
            checked |= {f"{wing}/{name}" if wing else name for name in names}
    rooms = {room.rstrip("/") for room in first_column("Rooms")}
    leaves = {leaf.removesuffix(".py") for leaf in re.findall(r"`([\w/]+\.py)` \(", section("Rooms"))}
    assert rooms | leaves | {"__main__", "core", "live", "lab"} == checked | {"core", "live", "lab"}
    folders = {
        str(folder.parent.relative_to(SOURCE))
        for depth in ("*", "core/*", "live/*", "lab/*")
        for folder in SOURCE.glob(f"{depth}/__init__.py")
    }
    assert folders - {"core", "live", "lab"} == rooms


def test_every_verb_is_there(isthmus: Command) -> None:
    status, out, _ = isthmus("--help")
    shown = set(re.findall(r"^  (\w+) ", out.partition("Commands:")[2], re.M))
    assert status == 0 and {verb.split()[1] for verb in first_column("Commands")} == shown


def test_the_page_prints_the_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert block == EXAMPLE.read_text() and len(block.splitlines()) <= 30


@pytest.mark.parametrize("shape", [{"roles.prefill": 3, "roles.decode": 2}, {"roles.mixed": 3}])
def test_the_example_decides_alike_in_both_worlds(shape: dict[str, int]) -> None:
    none = {"roles.prefill": 0, "roles.decode": 0}
    config = config_of({**none, **shape, "policy": THRIFTY, "cache.dram": "4MiB"})
    deployment = deployed(config, COSTS)
    requests = workload(40, 12_000_000)
    flight = same_worlds(config, deployment, requests)
    routes = [action for entry in flight.log for action in entry.actions if isinstance(action, Route)]
    assert any(route.fetch is not None for route in routes) and len(routes) >= 40


def test_the_example_simulates_serves_and_replays(
    isthmus: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ROOT / "examples/mooncake-fast25.yaml"
    load = "poisson:rate=8,num=50,input=1500,output=9,prefixes=5,prefix_tokens=2048"
    figures, recording = tmp_path / "out.json", tmp_path / "flight.jsonl"
    arguments = ("--config", deployment, "--workload", load, "--policy", THRIFTY, "--json", figures)
    assert isthmus("simulate", *arguments)[0] == 0
    assert json.loads(figures.read_bytes())["completed"] == 50
    with serve(tmp_path, None, *EMULATED, "--policy", THRIFTY, "--record", str(recording)) as served:
        assert len(served.tokens([1, 2, 3], 5)) == 5
    monkeypatch.delitem(POLICIES, THRIFTY)  # as in a process of its own
    status, out, err = isthmus("replay", recording)
    assert status == 2 and f"if it may be run, give --policy {THRIFTY}" in err, (out, err)
    status, out, _ = isthmus("replay", recording, "--policy", THRIFTY)
    assert status == 0 and "identical decisions" in out


def test_names_of_our_own_are_known_before_anything_is_loaded() -> None:
    assert {name for name in POLICIES if ":" not in name} == set(NAMES)
    assert {"none"} | {name for name in LENDING if ":" not in name} == set(LENDINGS)


@pytest.mark.parametrize("decides", ["policy", "lending"])
@pytest.mark.parametrize(
    ("text", "function", "says"),
    [
        (None, "f", "own.py is no Python file here"),
        ("x = 1", "f", "has no function f"),
        ("f = 1", "f", "has no function f"),
        ("import nowhere_at_all", "f", "cannot be run: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f(:", "f", "cannot be run: SyntaxError"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, text: str | None, function: str, says: str, decides: str
) -> None:
    file = tmp_path / "own.py"
    if text is not None:
        file.write_text(text)
    rules = Rules(**{decides: f"{file}:{function}"})
    with pytest.raises(ConfigError) as caught:
        make_known(rules)
    assert says in str(caught.value) and "\n" not in str(caught.value) and f"{file}:{function}" not in POLICIES


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"policy": {"name": "mooncake", "balance": 2}},
            "policy: mooncake: got an unexpected keyword argument 'balance'; its parameters: balancing_threshold",
        ),
        (
            {"policy": {"name": "isthmus", "rules": 2}},
            "policy: isthmus: multiple values for argument 'rules'; its parameters: none",
        ),
        (
            {"scheduling": {"admission": {"name": "predictive", "decode": 2}}},
            "scheduling.admission: predictive: got an unexpected keyword argument 'decode'; its parameters: decode_s",
        ),
        (
            {"scheduling": {"admission": {"name": "baseline", "decode_s": 2}}},
            "scheduling.admission: baseline: got an unexpected keyword argument 'decode_s'; its parameters: none",
        ),
        (
            {"lending": {"policy": "isthmus.lab.papers.infinite_llm.lending:rate"}},
            "lending.policy: isthmus.lab.papers.infinite_llm.lending:rate: too many positional arguments; "
            "its parameters: none",
        ),
    ],
)
def test_a_function_that_does_not_take_what_it_is_given_is_one_line(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules_of(load_config(None, section))
    assert str(caught.value) == says


def test_a_policy_of_ones_own_has_parameters_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def nth(estimator, rules, at=0.0):\n    return estimator.local(int(at))\n")
    for given, found in (({}, "prefill-0"), ({"at": 1}, "prefill-1")):
        rules = rules_of(load_config(None, {"policy": {"name": f"{file}:nth", **given}}))
        conductor, cost = Conductor(rules), Curve(kv_token_bytes=1, num_layers=1, prefill_token_s=1e-3)
        for name in ("prefill-0", "prefill-1", "decode-0"):
            conductor.on(NodeJoined(NodeId(name), Role(name[:-2]), 1600, 16, cost), 0)
        [route] = conductor.on(RequestArrived(RequestId("r"), "", 50, 5, ()), 0)
        assert isinstance(route, Route) and route.prefill == found
