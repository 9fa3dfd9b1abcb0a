"""Where a server and the node beside it meet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from isthmus.cluster.vllm.server import SWEEP_S, Ports, keep_to, own_folder

WAITS = "from isthmus.cluster.vllm.server import own_folder\nwith own_folder() as at: print(at, flush=True); input()"


def test_the_folder_of_a_killed_process_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    made = []
    for _ in range(2):
        made.append(
            subprocess.Popen([sys.executable, "-c", WAITS], env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)  # type: ignore[call-overload]
        )
    dead, living = (Path(process.stdout.readline().strip()) for process in made)
    (dead / "pages").touch()
    for folder in (dead, living):
        os.utime(folder, (0, folder.stat().st_mtime - 2 * SWEEP_S))
    made[0].send_signal(signal.SIGKILL)
    made[0].communicate()
    with own_folder() as mine:
        assert mine.parent == tmp_path and mine.stat().st_mode & 0o77 == 0
        assert not dead.exists() and living.exists()
    assert not mine.exists()
    made[1].communicate("\n")
    assert not living.exists() and not list(tmp_path.iterdir())


def test_a_port_is_kept_for_the_server_alone() -> None:
    """As one that listens at once, and as ZeroMQ does."""
    ports = Ports(2)
    try:
        for port in ports.numbers:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
                pass
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"tcp://127.0.0.1:{ports.numbers[1]}")
    finally:
        ports.close()


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
