"""Sweeps on a Ray cluster: what comes of them is what comes of one process, and one broken off leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.bench import policies
from isthmus.bench.policies import Sweep
from isthmus.workers import LocalPool
from tests.ray.machines import Machines, workers
from tests.served import LIMIT_S, POLL_S, alive, command

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
SPEC = "poisson:rate=4,num={num},input=3000,output=20,prefixes=5,prefix_tokens=4096"


def ray_pool() -> Any:
    from isthmus.live.cluster.ray_launcher import RayPool

    return RayPool()


def trace(folder: Path) -> str:
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": 3000 * (at // 4),
            "input_length": 600,
            "output_length": 5,
            "hash_ids": [at % 7, at + 1000],
        }
        for at in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_sweep_is_equal_byte_for_byte(cluster: Machines, tmp_path: Path) -> None:
    sources = (trace(tmp_path), SPEC.format(num=60))
    sweep = Sweep(sources, (2,), (1.0, 2.0), (3.0,), (1, 2), policies=("sticky", "isthmus"))
    heard: list[tuple[int, int]] = []
    far = policies.run(sweep, ray_pool(), lambda done, of: heard.append((done, of)))
    near = policies.run(sweep, LocalPool(1))
    written = [msgspec.json.encode(policies.as_json(sweep, cells)) for cells in (far, near)]
    assert written[0] == written[1]
    assert heard == [(done, 8) for done in range(1, 9)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_sweep_that_is_broken_off(cluster: Machines, number: signal.Signals) -> None:
    asked = ("bench", "policies", "--ray", "--trace", SPEC.format(num=1_000_000), "--nodes", "2,3")
    process = subprocess.Popen(command(*asked), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: len(workers()) > 1)
        started = workers()
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode != 0
        assert b"Traceback" not in said
        wait_until(lambda: not workers() and not any(map(alive, started)))
    finally:
        process.kill()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(POLL_S)
