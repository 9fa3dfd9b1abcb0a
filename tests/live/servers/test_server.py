"""Where a server and the node beside it meet."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from isthmus.config import Config, load_config
from isthmus.core.errors import StartError
from isthmus.core.types import NodeId, Role
from isthmus.live.cluster.launcher import LaunchSpec
from isthmus.live.servers import server
from isthmus.live.servers.server import SWEEP_S, Ports, Server, ServerSockets, own_folder, settle

WAITS = "from isthmus.live.servers.server import own_folder\nwith own_folder() as at: print(at, flush=True); input()"


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


RESTLESS = """
import os, threading, time
def move():
    os.sched_setaffinity(0, {LAST})
    print("moved", flush=True)
    while True:
        pass
threading.Thread(target=move, daemon=True).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
time.sleep(60)
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_threads_that_left_their_cores_or_never_sleep_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    used: list[dict[tuple[int, int], float]] = []
    measured = server._thread_seconds

    def seconds(leader: int) -> dict[tuple[int, int], float]:
        """The second time, when one that never sleeps has had its turns."""
        while True:
            found = measured(leader)
            if not used or any(found[each] > used[0][each] + server.IDLE_S / 5 for each in found):
                used.append(found)
                return found

    monkeypatch.setattr(server, "_thread_seconds", seconds)
    command = [sys.executable, "-c", RESTLESS.replace("LAST", str(last))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"moved\n"
            threads = sorted(map(int, os.listdir(f"/proc/{child.pid}/task")))
            (moved,) = [thread for thread in threads if os.sched_getaffinity(thread) == {last}]
            own = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
            asyncio.run(settle(child.pid, [first]))
            assert all(os.sched_getaffinity(thread) == {first} for thread in threads)
            nice = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
            assert nice == dict.fromkeys(threads, own[1]) | {moved: min(own[1] + 10, 19)}
            assert own == (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))
        finally:
            child.kill()


FAILS = """#!/bin/sh
head -c 300000 /dev/zero | tr '\\0' x
echo
echo "(EngineCore pid=7) ERROR 11-25 [core.py:9] ModuleNotFoundError: No module named 'isthmus_vllm'"
head -c 300000 /dev/zero | tr '\\0' y
echo
echo "RuntimeError: Engine core initialization failed. See root cause above."
exit 1
"""


def server_config(python: Path, **vllm: str) -> Config:
    engine = {"kind": "vllm", "device": "cpu", "vllm": {"python": str(python), **vllm}}
    return load_config(None, {"engine": engine, "cache.dram": "1GiB"})


async def start(config: Config, folder: Path, within_s: float) -> None:
    spec = LaunchSpec(NodeId("mixed-0"), Role.MIXED, "", "", str(folder), 1, "")
    server = await Server.start(config, spec, "float32", 100, ServerSockets(str(folder)))
    try:
        await server.ready(within_s)
    finally:
        await server.stop()


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """However much it says, and all of that is kept where it was asked for."""
    python = script(tmp_path / "python", FAILS)
    cause = "vLLM ended with exit status 1: ModuleNotFoundError: No module named 'isthmus_vllm' "
    with pytest.raises(StartError, match=re.escape(cause + "(engine.vllm.logs keeps all it says)")):
        await start(server_config(python), tmp_path, 60)
    logs = tmp_path / "logs"
    with pytest.raises(StartError, match=re.escape(cause + f"(all it said: {logs}/mixed-0.log)")):
        await start(server_config(python, logs=str(logs)), tmp_path, 60)
    found = (logs / "mixed-0.log").stat()
    assert found.st_size > 600_000 and found.st_mode & 0o777 == 0o600


async def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(StartError, match=r"vLLM at http://127\.0\.0\.1:\d+ did not answer within 0\.5 s"):
        await start(server_config(python), tmp_path, 0.5)
