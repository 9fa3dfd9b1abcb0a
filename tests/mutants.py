"""Plants small bugs, one at a time, and sees whether a room's own tests find them: `make mutants ARGS="--seed 7"`.

A place is drawn at random (by a seed), then one of the changes of `mutations` that fit there. A mutant is tried in a
copy of the tree by the tests of its room alone, until the first failure; it is found when a test fails or the time is
up. Mutants that change nothing one could see stand in `mutants.yaml`, each with the reason.
"""

from __future__ import annotations

import argparse
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
from itertools import islice
from pathlib import Path
from typing import Any

from isthmus.yaml_file import read_document
from tests.mutations import Mutant, places
from tests.scratch import ROOT, copied, environment

# Of the executors all that needs no live processes.
QUICK = {
    "cluster": "donors head in_memory pipeline recorder runs stage streams trust virtual",
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


def draw(room: str, seed: int, known: set[tuple[str, str]]) -> Iterator[Mutant]:
    folders, left_out, _ = ROOMS[room]
    chance = random.Random(f"{room} {seed}")
    files = [path for folder in folders for path in sorted((ROOT / "src/isthmus" / folder).rglob("*.py"))]
    paths = [path for path in files if path.name not in left_out]
    every = [place for path in paths for place in places(path)]
    chance.shuffle(every)
    for place in every:
        drawn = Mutant(place, chance.choice(place.others))
        if (drawn.what, drawn.path) not in known:
            yield drawn


def again(room: str, missed: list[dict[str, Any]]) -> Iterator[Mutant]:
    """Those mutants of the room once more, wherever their lines stand by now."""
    wanted = {(one["what"], one["path"]) for one in missed if one["room"] == room}
    for path in sorted({path for _, path in wanted}):
        every = (Mutant(place, node) for place in places(ROOT / path) for node in place.others)
        yield from (one for one in every if (one.what, path) in wanted)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    parser.add_argument("--not-in", type=Path, nargs="*", default=[], help="leave out what these files tried")
    parser.add_argument(
        "--again", type=Path, help="try again what survived in this file, instead of a new sample"
    )
    asked = parser.parse_args()
    known = {(one["what"], one["path"]) for path in asked.not_in for one in lines_of(path)}
    missed = [one for one in lines_of(asked.again) if one["outcome"] == "survived"] if asked.again else []
    records = []
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, asked.out.open("w") as out:
        scratch = compiled(Path(folder))
        for room in asked.rooms:
            mutants = list(
                again(room, missed) if asked.again else islice(draw(room, asked.seed, known), asked.count)
            )
            for record in tried(room, mutants, scratch) if mutants else ():
                records.append(record)
                print(json.dumps(record), file=out, flush=True)
                print("{outcome:10} {seconds:5} s {path}:{line} {what}".format(**record), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
