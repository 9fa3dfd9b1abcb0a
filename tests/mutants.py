"""Plants small bugs, one at a time, and sees whether a room's own tests find them: `make mutants ARGS="--seed 7"`.

A place is drawn at random (by a seed), then a change that fits: a statement is left out, a condition, a comparison
or a sum turned round, a number changed by one. Left alone are words (annotations, docstrings, `__repr__`), logging,
assertions and `check` (tests themselves), and constants with a name (a choice, not a rule). A mutant is tried in a copy
of the tree by the tests of its room alone, until the first failure; it is found when a test fails or the time is up.
Mutants that change nothing one could see stand in `mutants.yaml`, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import json
import os
import py_compile
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.yaml_file import read_document
from tests.edits import Slot, held
from tests.scratch import ROOT, copied, environment

# Of the executors all that needs no live processes.
QUICK = {
    "cluster": "head node pipeline recorder stage trust virtual",
    "kv": "cache faults fetches handover hosting",
    "peers": "link_monitor sessions",
}
EXECUTORS = [f"tests/live/{room}/test_{name}.py" for room, names in QUICK.items() for name in names.split()]
# Of each room: its folders, the files that only live processes run, and its tests.
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "node": (("core/node",), (), ("tests/core/node",)),
    "scheduler": (("core/scheduler",), (), ("tests/core/scheduler", "tests/core/node")),
    "conductor": (("core/conductor",), (), ("tests/core/conductor",)),
    "store": (("live/store",), (), ("tests/live/store",)),
    "messenger": (("live/messenger",), (), ("tests/live/messenger",)),
    "executors": (
        ("live/cluster", "live/kv", "live/peers"),
        ("launcher.py", "local.py", "process.py", "ray_launcher.py"),
        ("tests/core/node", *EXECUTORS),
    ),
}
KEPT = {(what, path) for what, row in read_document(ROOT / "tests/mutants.yaml").values.items() for path in row}
CPU_S, WALL_S, MEMORY_BYTES = 60, 240, 8 << 30


OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.And: (ast.Or,), ast.Or: (ast.And,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.FloorDiv,), ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.Break: (ast.Continue,), ast.Continue: (ast.Break,),
}  # fmt: skip
WORDS = ("__repr__", "__str__", "check", "check_idle")


class Place(NamedTuple):
    """`others`: nodes that may stand there instead."""

    path: str
    tree: ast.Module
    statement: ast.AST
    slot: Slot
    others: list[ast.AST]


class Mutant:
    """A node in the place of another. `what`: how its statement reads, and then reads: the first line that differs."""

    def __init__(self, place: Place, node: ast.AST) -> None:
        self._tree, self._slot, self._node = place.tree, place.slot, node
        self.path, self.line = place.path, getattr(place.statement, "lineno", 0)
        before = ast.unparse(place.statement).splitlines()
        self._slot.put(node)
        after = ast.unparse(node if self._slot.node is place.statement else place.statement).splitlines()
        self._slot.put(self._slot.node)
        pairs = zip_longest(before, after, fillvalue="")
        self.what = next(f"{one.strip()} -> {other.strip()}" for one, other in pairs if one != other)

    def code(self) -> str:
        self._slot.put(self._node)
        code = ast.unparse(self._tree)
        self._slot.put(self._slot.node)
        return code


def places(path: Path) -> Iterator[Place]:
    """Where something can be changed in a file."""
    tree = ast.parse(path.read_text())
    yield from _below(str(path.relative_to(ROOT)), tree, tree, tree)


def _below(path: str, tree: ast.Module, statement: ast.AST, owner: ast.AST) -> Iterator[Place]:
    for slot in held(owner):
        if not _is_quiet(slot):
            inner = slot.node if isinstance(slot.node, ast.stmt | ast.ExceptHandler) else statement
            if others := list(_others(slot)):
                yield Place(path, tree, inner, slot, others)
            yield from _below(path, tree, inner, slot.node)


def _others(slot: Slot) -> Iterator[ast.AST]:
    node = slot.node
    yield from (other() for other in OTHERS.get(type(node), ()))
    if slot.field == "test" and isinstance(node, ast.expr):
        yield ast.UnaryOp(ast.Not(), node)
    if isinstance(slot.owner, ast.For) and slot.field == "iter":
        yield ast.List([], ast.Load())
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + by) for by in (1, -1) if value + by != value)
        case ast.ExceptHandler(name=name, body=body):
            yield ast.ExceptHandler(ast.Name("ZeroDivisionError", ast.Load()), name, body)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target, value=ast.expr()):
            # A plain name that is never bound would fail at once: only those that others see.
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield ast.Pass()


def _is_quiet(slot: Slot) -> bool:
    match slot.owner, slot.node:
        case _, ast.Assert() | ast.keyword(arg="strict") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case _, ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "log")))):
            return True
        case _, ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name in WORDS
        case ast.Module() | ast.ClassDef(), ast.Assign() | ast.AnnAssign():
            return True
        case ast.ClassDef(), ast.keyword():
            return True
    return slot.field in ("annotation", "returns", "decorator_list")


def draw(room: str, seed: int) -> Iterator[Mutant]:
    folders, left_out, _ = ROOMS[room]
    chance = random.Random(f"{room} {seed}")
    files = [path for folder in folders for path in sorted((ROOT / "src/isthmus" / folder).rglob("*.py"))]
    paths = [path for path in files if path.name not in left_out]
    every = [place for path in paths for place in places(path)]
    chance.shuffle(every)
    return (Mutant(place, chance.choice(place.others)) for place in every)


def compiled(scratch: Path) -> Path:
    """A copy of the tree whose compiled files are judged by their source, not by a clock that is too coarse."""
    copied(scratch)
    compileall.compile_dir(scratch, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return scratch


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def outcome(tests: Iterable[str], scratch: Path, **env: str) -> str:
    """How these tests end: `survived`, `found` or `timed out` (a minute of CPU, or hanging)."""
    shutil.rmtree(scratch / ".hypothesis", ignore_errors=True)
    # What hangs ends at once, with status 1: who failed might hang again while it is cleaned up.
    limits = ["--timeout=30", "--timeout-method=thread"]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *limits, *tests]
    env = environment(scratch, **env)
    with (scratch / "said.txt").open("w") as said:
        kind: dict[str, Any] = {"stdout": said, "stderr": said, "start_new_session": True}
        with subprocess.Popen(command, cwd=scratch, env=env, preexec_fn=_limits, **kind) as run:
            try:
                status = run.wait(timeout=WALL_S)
            except subprocess.TimeoutExpired:
                status = -signal.SIGXCPU
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    if status > 2:
        raise SystemExit((scratch / "said.txt").read_text())
    return "timed out" if status < 0 else "found" if status else "survived"


def by_room(room: str, path: str, scratch: Path) -> str:
    """How the room's tests end: first the file that mirrors the one changed, if there is one."""
    env = {"PYTHONDONTWRITEBYTECODE": "1"}
    mirror = str(Path("tests", *Path(path).parts[2:-1], f"test_{Path(path).name}"))
    end = outcome([mirror], scratch, **env) if (scratch / mirror).exists() else "survived"
    return outcome(ROOMS[room][2], scratch, **env) if end == "survived" else end


def tried(room: str, mutants: Iterable[Mutant], scratch: Path) -> Iterator[dict[str, Any]]:
    """One record for each mutant; the tests must pass without any."""
    if outcome(ROOMS[room][2], scratch) != "survived":
        raise SystemExit(f"{room}: its tests fail without a mutant\n" + (scratch / "said.txt").read_text())
    for one in mutants:
        same = (one.what, one.path) in KEPT
        start_s = time.monotonic()
        code = (scratch / one.path).read_text()
        (scratch / one.path).write_text(one.code())
        end = "equivalent" if same else by_room(room, one.path, scratch)
        (scratch / one.path).write_text(code)
        said = {"room": room, "outcome": end, "seconds": round(time.monotonic() - start_s, 1)}
        yield said | {"path": one.path, "line": one.line, "what": one.what}


def table(records: list[dict[str, Any]]) -> str:
    """By room, in Markdown; the rate is of those that are not equivalent."""
    rows = [
        "| room | sampled | found | timed out | equivalent | survived | rate |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for room in [*ROOMS, "all"]:
        ends = Counter(record["outcome"] for record in records if room in (record["room"], "all"))
        num = ends.total() - ends["equivalent"]
        if num:
            parts = [ends.total(), *(ends[end] for end in ("found", "timed out", "equivalent", "survived"))]
            rate = 1 - ends["survived"] / num
            rows.append(f"| {room} | {' | '.join(map(str, parts))} | {rate:.0%} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), choices=ROOMS)
    parser.add_argument("--count", type=int, default=35, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.jsonl", help="is written anew")
    asked = parser.parse_args()
    records = []
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, asked.out.open("w") as out:
        scratch = compiled(Path(folder))
        for room in asked.rooms:
            for record in tried(room, islice(draw(room, asked.seed), asked.count), scratch):
                records.append(record)
                print(json.dumps(record), file=out, flush=True)
                print("{outcome:10} {seconds:5} s {path}:{line} {what}".format(**record), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
