"""Runs the tests under conditions by which none may fail: `make steady ARGS="--times 3 one-core shuffle"`.

Each run is of the whole suite, or of the part that PYTEST names (after `--`), in a copy of the tree. What failed under
which condition is printed at the end; logs and a line of JSON for each run are in `.steady/`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.pace import PACE
from tests.scratch import ROOT, copied, environment

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
LIMIT_S = 3600


class Condition(NamedTuple):
    """`command`: what starts pytest; `burners`: processes that do nothing but compute; `pace`: how many times as long
    an emulated engine takes; `seeded`: what of a run depends on its number: `order` of tests, `hash`es, or which
    `threads` and processes are late."""

    command: str = ""
    burners: int = 0
    pace: float = 1.0
    seeded: str = ""


def on_cores(count: int) -> Condition:
    """On so many of those that are there for this process, which need not begin with 0."""
    return Condition("taskset -c " + ",".join(map(str, sorted(os.sched_getaffinity(0))[:count])))


CONDITIONS = {
    "quiet": Condition(),
    "one-core": on_cores(1),
    "two-cores": on_cores(2),
    "burners": Condition(burners=2),
    "four-burners": Condition(burners=4),
    "nice": Condition("nice -n 19", burners=1),
    "slow-engine": Condition(pace=4.0),
    "quick-engine": Condition(pace=0.25),
    "shuffle": Condition(seeded="order"),
    "hash": Condition(seeded="hash"),
    "late": Condition(seeded="threads"),
}


class Run(NamedTuple):
    condition: str
    number: int
    status: int
    seconds: float
    failed: tuple[str, ...]
    said: str
    """Its last line."""


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def command_of(condition: Condition, number: int, workers: int, asked: Sequence[str]) -> list[str]:
    order = ["--shuffle", str(number)] if condition.seeded == "order" else []
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
    ]
    return [*shlex.split(condition.command), *pytest, *order, *asked]


def run(name: str, number: int, workers: int, asked: Sequence[str], logs: Path) -> Run:
    condition = CONDITIONS[name]
    seed = str(number) if condition.seeded == "hash" else os.environ.get("PYTHONHASHSEED", "0")
    log = logs / f"{name}-{number}.log"
    with (
        tempfile.TemporaryDirectory(prefix="steady-") as folder,
        burning(condition.burners),
        log.open("w") as said,
    ):
        scratch = copied(Path(folder) / "tree")
        env = environment(scratch, PYTHONHASHSEED=seed, **{PACE: str(condition.pace)})
        if condition.seeded == "threads":
            env |= {
                "PYTHONPATH": f"{env['PYTHONPATH']}:{scratch}/tests/late",
                "ISTHMUS_TESTS_LATE": str(number),
            }
        began = time.monotonic()
        command = command_of(condition, number, workers, [*asked, f"--basetemp={folder}/kept"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=scratch, env=env, stdout=said, stderr=said, timeout=LIMIT_S)
        seconds = round(time.monotonic() - began, 1)
    text = log.read_text()
    last = text.rstrip().rpartition("\n")[2]
    failed = tuple(dict.fromkeys(FAILED.findall(text)))
    status = 0 if " passed" in last and " failed" not in last and " error" not in last else 1
    return Run(name, number, status, seconds, failed, last)


def table(runs: Sequence[Run]) -> str:
    """Each test that failed, and in which runs."""
    where: dict[str, list[str]] = defaultdict(list)
    for each in runs:
        for test in each.failed or (("(no summary)",) if each.status else ()):
            where[test].append(f"{each.condition} {each.number}")
    green = sum([not each.status for each in runs])
    lines = [
        f"{green} of {len(runs)} runs green",
        *[f"{test}: {', '.join(found)}" for test, found in where.items()],
    ]
    return "\n".join(lines)


def main() -> None:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "conditions", nargs="*", metavar="condition", help=f"of {', '.join(CONDITIONS)}; all if none"
    )
    parser.add_argument("--times", type=int, default=1, help="runs of each")
    parser.add_argument("--first", type=int, default=1, help="number of the first one, which seeds are made of")
    parser.add_argument("--workers", type=int, default=3)
    options, asked = parser.parse_args(given[:at]), given[at + 1 :]
    unknown = [name for name in options.conditions if name not in CONDITIONS]
    if unknown:
        parser.error(f"no condition {unknown[0]!r}; there are {', '.join(CONDITIONS)}")
    logs = ROOT / ".steady"
    logs.mkdir(exist_ok=True)
    runs: list[Run] = []
    numbers = range(options.first, options.first + options.times)
    with (logs / "runs.jsonl").open("a") as kept:
        for number, name in itertools.product(numbers, options.conditions or CONDITIONS):
            runs.append(run(name, number, options.workers, asked, logs))
            print(f"{name} {number}: {runs[-1].said.strip('= ')}", *runs[-1].failed, sep="\n  ", flush=True)
            print(json.dumps(runs[-1]._asdict()), file=kept, flush=True)
    print(table(runs))
    sys.exit(any(each.status for each in runs))


if __name__ == "__main__":
    main()
