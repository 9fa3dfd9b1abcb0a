from __future__ import annotations

import subprocess
import sys

import msgspec

from tests.live.store.killing import Counts

CYCLES = 24
"""Here; `python -m tests.live.store.killing --cycles 1000` does more."""


def test_kill_9_loses_nothing_that_was_acknowledged() -> None:
    """In a process of its own, since it forks and the tests have threads."""
    command = [sys.executable, "-m", "tests.live.store.killing", "--cycles", str(CYCLES)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and not shown.stderr, shown.stderr
    counts = [msgspec.json.decode(line, type=Counts) for line in shown.stdout.splitlines()]
    assert sum(one.cycles for one in counts) == CYCLES
    for one in counts:
        assert one.blocks_offered > 0 and one.acknowledged > 0
        assert one.crashes == one.wrong_blocks == one.lost_acknowledged == 0
        assert one.leaked_places == one.bytes_over_capacity == 0
