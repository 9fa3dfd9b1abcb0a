"""The pure rooms stay pure: no torch, no clock, no I/O, quick to load. And nobody executes data."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import msgspec
import pytest

from isthmus.core.types import NodeId, Role

SRC = Path(__file__).parent.parent / "src" / "isthmus"
CORE = sorted((SRC / "core").rglob("*.py"))
IMPURE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "numpy", "os", "pathlib", "pydantic", "random",
    "secrets", "socket", "subprocess", "tempfile", "threading", "time", "torch", "uuid",
}  # fmt: skip
IMPURE_CALLS = {"open", "input", "print", "hash", "id", "globals"}
SOURCES = sorted(SRC.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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
    imported = imports_of(tree)
    for forbidden in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
        if forbidden in imported:
            yield f"imports {forbidden}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ("eval", "exec", "torch.load", "yaml.load"):
            yield f"line {node.lineno}: calls {called(node)}"
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "yaml"):
            yield from (f"line {node.lineno}: imports load" for alias in node.names if alias.name == "load")


def python(code: str, **environment: str) -> str:
    command, root = [sys.executable, "-c", code], SRC.parent.parent
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=root, env=env)
    return done.stdout.strip()


def test_core_imports_no_clock_chance_or_io() -> None:
    assert len(CORE) > 50
    for path in CORE:
        tree = tree_of(path)
        assert not imports_of(tree) & IMPURE, path
        calls = {called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not calls & IMPURE_CALLS, path


def test_no_file_executes_data() -> None:
    assert [(path, danger) for path in SOURCES for danger in dangers_of(tree_of(path))] == []


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
    ("code", "count"),
    [("eval(x)", 1), ("def f():\n    exec(x)", 1), ("import pickle", 1), ("from marshal import loads", 1),
     ("torch.load(f)", 1), ("yaml.load(f)", 1), ("from yaml import load", 1),
     ("model.eval()\nyaml.safe_load(f)\njson.load(f)\n'eval(x)'", 0)],
)  # fmt: skip
def test_the_danger_check_would_find(code: str, count: int) -> None:
    assert len(list(dangers_of(ast.parse(code)))) == count


def test_one_module_imports_ray() -> None:
    found = [path for path in SOURCES if "ray" in imports_of(tree_of(path))]
    assert [str(path.relative_to(SRC)) for path in found] == ["live/cluster/ray_launcher.py"]


def loaded_with(*modules: str) -> tuple[set[str], set[str], int]:
    """What importing them loads in a fresh process: all modules, packages that are not Python's, how many modules more
    than without."""
    code = f"import sys; print(len(sys.modules)); import {', '.join(modules)}; print(*sys.modules)"
    before, after = python(code).split("\n")
    loaded = set(after.split())
    foreign = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    foreign = {name for name in foreign if not name.startswith("__editable__")}
    foreign -= {"_distutils_hack", "sitecustomize", "__main__", "typing_extensions"}
    return loaded, foreign, len(loaded) - int(before)


def test_the_package_and_core_load_little() -> None:
    """That is what lets them load in well under 0.3 s; the time itself no test should judge."""
    rooms = [f"isthmus.core.{path.stem}" for path in (SRC / "core").iterdir() if path.stem[0] != "_"]
    loaded, foreign, more = loaded_with("isthmus", *rooms)
    assert foreign == {"isthmus", "msgspec", "blake3", "xxhash"}
    assert "isthmus.config" not in loaded and more < 200


def test_the_connector_takes_into_vllm_only_what_is_light() -> None:
    sources = (SRC.parent.parent / "connectors/vllm/src").rglob("*.py")
    nodes = [node for path in sources for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    taken = {node.module for node in nodes if node.module and node.module.startswith("isthmus.")}
    loaded, foreign, _ = loaded_with(*taken)
    assert "isthmus.live.servers.wire" in taken and "isthmus.config" not in loaded
    assert foreign == {"isthmus", "msgspec", "blake3", "xxhash", "numpy"}


def test_help_looks_at_no_verb_and_at_nothing_that_verbs_need() -> None:
    """That is what makes it quick."""
    code = "import sys; from isthmus.cli.main import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    loaded = set(python(code).splitlines()[-1].split())
    assert {name for name in loaded if name.startswith("isthmus.cli.")} == {"isthmus.cli.main"}
    assert not {"rich", "pydantic", "yaml", "msgspec", "isthmus.config"} & loaded


SAME_ACTIONS = """
import hashlib
from random import Random
from tests.core.conductor.test_conductor import RULES, cluster, play
from tests.test_purity import simulated
digest = hashlib.sha256(simulated())
for seed, rules in enumerate(RULES):
    some = cluster("p1", "p2", "d1", "m1", rules=rules, step_ns=10**6)
    play(some, Random(seed), 150)
    digest.update(some.encoded_log())
print(digest.hexdigest())
"""


def simulated() -> bytes:
    """What conductor and schedulers decide in a small simulation with fetches, two tiers and refusals."""
    from isthmus.core.conductor import Rules
    from isthmus.core.cost import Curve
    from isthmus.facts import NodeFacts, Rates
    from isthmus.lab.sim.deployment import FAR, Deployment
    from isthmus.lab.sim.simulation import Simulation
    from isthmus.lab.sim.workloads import Request, Workload

    curve = Curve(
        kv_token_bytes=1000, num_layers=2, prefill_token_s=2e-3, decode_fixed_s=0.01, decode_sequence_s=1e-3
    )
    rates = Rates(network=10**8, memory=10**10, disk_read=10**9, disk_write=10**9)
    common = {"rates": rates, "order": "promise", "max_steps": FAR, "max_chunks": FAR}
    nodes = [NodeFacts(NodeId(f"p{at}"), Role.PREFILL, curve, 400, 16, 60, 60, **common) for at in range(4)]
    nodes += [NodeFacts(NodeId(f"d{at}"), Role.DECODE, curve, 400, 16, **common) for at in range(2)]
    rules = Rules("isthmus", admission="survival", ttft_ms=2000, tbt_ms=50)
    deployment = Deployment(tuple(nodes), rules)
    random, requests = Random(3), []
    for at in range(250):
        shared = random.randrange(6)
        blocks = (*range(100 * shared, 100 * shared + 20), *range(10_000 + 9 * at, 10_005 + 9 * at))
        requests.append(Request(at * 25_000_000, 16 * len(blocks), random.randint(1, 60), blocks))
    log: list[tuple[int, object, object]] = []
    world = Simulation(
        deployment, Workload("", 16, requests), log=lambda now, event, to: log.append((now, event, to))
    )
    world.run()
    return msgspec.json.encode(log)


def test_two_hash_seeds_give_the_same_actions() -> None:
    """Strings and bytes hash differently then, so an order that comes from a set would show."""
    assert python(SAME_ACTIONS, PYTHONHASHSEED="1") == python(SAME_ACTIONS, PYTHONHASHSEED="2")


def test_rooms_import_only_what_the_design_allows() -> None:
    """The contracts are in pyproject.toml, where import-linter reads them."""
    lint = Path(sys.executable).parent / "lint-imports"
    command = [str(lint), "--no-cache", "--config", str(SRC.parent.parent / "pyproject.toml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=SRC.parent.parent)
    assert result.returncode == 0, result.stdout + result.stderr
