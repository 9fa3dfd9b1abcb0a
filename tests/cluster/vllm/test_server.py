"""A server's processes, without a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isthmus.cluster.vllm.server import keep_to

MOVER = """
import os, threading, time
def move():
    os.sched_setaffinity(0, {LAST})
    print("moved", flush=True)
    time.sleep(60)
threading.Thread(target=move, daemon=True).start()
time.sleep(60)
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_threads_that_left_their_cores_are_brought_back() -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-c", MOVER.replace("LAST", str(last))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"moved\n"
            threads = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
            assert {last} in [os.sched_getaffinity(thread) for thread in threads]
            own = os.sched_getaffinity(0)
            keep_to(child.pid, [first])
            assert all(os.sched_getaffinity(thread) == {first} for thread in threads)
            assert os.sched_getaffinity(0) == own
        finally:
            child.kill()
