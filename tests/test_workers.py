"""Workers: processes that compute one thing each, and none of which outlives who asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.bench.policies import Sweep
from isthmus.bench.policy_cells import Cell, common_of
from isthmus.core.errors import ConfigError, IsthmusError
from isthmus.lab.planner.answer import to_json
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.planner.search import answer
from isthmus.lab.planner.trials import Trials
from isthmus.workers import LocalPool, Work
from tests.lab.planner.fleets import config, demand
from tests.served import LIMIT_S

MODULE = "isthmus.bench.policy_cells"
SPEC = "poisson:rate=4,num={num},input=3000,output=20,prefixes=5,prefix_tokens=4096"


def works(num: int, *nodes: int) -> list[Work]:
    sweep = Sweep((SPEC.format(num=num),), nodes, (1.0,), (3.0,), policies=("sticky", "isthmus"))
    tasks = sweep.tasks()
    shared = msgspec.msgpack.encode(common_of(tasks[0]))
    return [Work(shared, msgspec.msgpack.encode(task)) for task in tasks]


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    heard: list[tuple[int, int]] = []
    found = LocalPool(3).run(MODULE, works(20, 3, 1, 2), lambda done, of: heard.append((done, of)))
    cells = [msgspec.msgpack.decode(each, type=list[Cell]) for each in found]
    assert [cell.nodes for [cell] in cells] == [3, 1, 2]
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_plans_are_simulated_elsewhere_as_they_are_here() -> None:
    settings = config(remote=1, prefill=2, decode=2, slo={"ttft_ms": 3000})
    asked = demand([400 * index for index in range(1, 11)], output_tokens=10)
    found = answer(settings, fleet_of(settings), asked, top=1)
    trials = Trials(settings, Path(), asked, num_requests=20, goodput=0.9)
    assert to_json(trials.of(found, None, LocalPool(2))) == to_json(trials.of(found, None))


def test_a_worker_that_dies_is_one_line() -> None:
    with pytest.raises(IsthmusError, match=r"^a worker ended with 1: .*no-such-module") as caught:
        LocalPool(1).run("no-such-module", [Work(bytes(1 << 20), b"")])
    assert not isinstance(caught.value, ConfigError)


def test_at_least_one_runs() -> None:
    with pytest.raises(ConfigError, match="--jobs 0"):
        LocalPool(0)


def test_a_worker_leaves_when_its_input_ends() -> None:
    """However long it would have computed."""
    [work] = works(1000, 2)
    task: dict[str, Any] = msgspec.msgpack.decode(work.own)
    task["source"] = SPEC.format(num=1_000_000)
    own = msgspec.msgpack.encode(task)
    process = subprocess.Popen([sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"%d %d\n" % (len(work.shared), len(own)) + work.shared + own)
    process.stdin.close()
    assert process.wait(LIMIT_S) == 1
    assert process.stdout.read() == b""
    process.stdout.close()


def test_whoever_breaks_off_leaves_no_worker(tmp_path: Path) -> None:
    code = (
        "import signal, sys\nfrom isthmus.workers import LocalPool, Work\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells start what is in the background without
        "LocalPool(1).run(sys.argv[1], [Work(b'', b'')])\n"
    )
    (tmp_path / "waiting.py").write_text(
        "import os, sys, time\nsys.stdin.buffer.readline()\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "waiting"], env=environment, stderr=subprocess.DEVNULL
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.01)  # not to take the core that it starts on
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) != 0
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
