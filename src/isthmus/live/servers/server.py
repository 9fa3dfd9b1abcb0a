"""A stock vLLM server: started here, or attached to."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from isthmus.config import Config, child_environment, vllm_key
from isthmus.core.errors import StartError
from isthmus.live.cluster.launcher import LaunchSpec
from isthmus.live.cluster.private import private
from isthmus.live.servers.client import MODEL, Client, EngineError

log = logging.getLogger(__name__)

POLL_S = 0.2
IDLE_S = 0.5
RESTLESS, NICEST = 10, 19
"""Nice value added for threads that never sleep, and the highest nice value."""
STOP_S = 20.0
TAIL_LINES = 400
LINE_BYTES = 4096
"""Bytes kept of each line of a server's output."""
READ_BYTES = 1 << 16
FOLDER = "isthmus-beside-"
TCP = "tcp://"
SWEEP_S = 60.0
"""Younger folders are not swept: they may not be locked yet."""
_CAUSE = re.compile(r"\b\w*(?:Error|Exception): .+")
_PR_SET_PDEATHSIG = 1


class ServerSockets:
    """Where a server and the node beside it meet: sockets in a private folder; or `tcp://HOST:PORT`, which has KV
    events, their replay on the next port, and no pages."""

    def __init__(self, where: str) -> None:
        if where.startswith(TCP):
            host, _, port = where.rpartition(":")
            self.pages = None
            self.kv_events, self.replay = where, f"{host}:{int(port) + 1}"
        else:
            self.pages = Path(where, "pages")
            self.kv_events, self.replay = f"ipc://{where}/events", f"ipc://{where}/replay"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Yields a temporary folder for `ServerSockets`. Also removes those of killed processes, whose locks are free."""
    with tempfile.TemporaryDirectory(prefix=FOLDER) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _sweep(Path(name).parent)
            yield Path(name)
        finally:
            os.close(lock)


def _sweep(folder: Path) -> None:
    for path in folder.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < SWEEP_S:
                continue
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its maker lives
                shutil.rmtree(path)
            finally:
                os.close(lock)


def arguments_of(
    config: Config, model: str, dtype: str, max_length: int, port: int, sockets: ServerSockets
) -> list[str]:
    """Returns vLLM's arguments for a server that is a node, as `docs/vllm.md` lists them. `max_length`: 0 for as much
    as its memory holds."""
    engine, found = config.engine, ["--model", model, "--served-model-name", MODEL, "--dtype", dtype]
    found += ["--host", "127.0.0.1", "--port", str(port)]
    found += ["--enable-prompt-tokens-details", "--enable-prefix-caching"]
    kv_events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
    kv_events |= {"endpoint": sockets.kv_events, "replay_endpoint": sockets.replay}
    found += ["--kv-events-config", json.dumps(kv_events), "--kv-transfer-config", _transfer(config, sockets)]
    given = engine.model_fields_set
    found += ["--max-model-len", str(max_length or -1)]
    if "block_size" in given:
        found += ["--block-size", str(engine.block_size)]
    if "max_sequences" in given:
        found += ["--max-num-seqs", str(engine.max_sequences)]
    if "token_budget" in given:
        found += ["--max-num-batched-tokens", str(engine.token_budget)]
    if "kv_memory" in given or engine.device == "cpu":
        found += ["--kv-cache-memory-bytes", str(engine.kv_memory)]
    if engine.device == "cpu":
        found += ["--enforce-eager"]  # compiling takes a minute at each start, and gains little there
    if engine.gpus > 1:
        found += ["--tensor-parallel-size", str(engine.gpus)]
    return found + list(engine.vllm.args)


def _transfer(config: Config, sockets: ServerSockets) -> str:
    found: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if config.engine.vllm.transfer == "pool":
        found |= {"kv_connector": "IsthmusConnector", "kv_connector_module_path": "isthmus_vllm.connector"}
        found["kv_connector_extra_config"] = {"socket": str(sockets.pages)}
    else:
        found["kv_connector"] = "NixlConnector"
        if config.engine.device == "cpu":
            found["kv_buffer_device"] = "cpu"
    return json.dumps(found)


def environment_of(config: Config, spec: LaunchSpec, side_port: int) -> dict[str, str]:
    """Returns the environment of a node's server. `side_port`: where other servers fetch KV by NIXL."""
    found = child_environment(spec.threads) | {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": spec.host}
    found.pop("OMP_WAIT_POLICY", None)
    found.setdefault("VLLM_API_KEY", secrets.token_hex(16))  # other users of the machine reach its port
    if config.engine.device == "cpu" and spec.cores:
        # Two servers that take the same cores spin against each other.
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec.cores))
    if spec.devices:
        found["CUDA_VISIBLE_DEVICES"] = spec.devices
    if config.engine.vllm.transfer == "nixl":
        found |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    return found | config.engine.vllm.env


class Ports:
    """Ports for a server, reserved until it listens there."""

    def __init__(self, count: int) -> None:
        self._held = [socket.socket() for _ in range(count)]
        self.numbers: list[int] = []
        for each in self._held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that the server may listen there
            each.bind(("", 0))
            self.numbers.append(each.getsockname()[1])

    def close(self) -> None:
        for each in self._held:
            each.close()


class Server:
    """A vLLM server. `process`, `ports`: None if it was not started here; `cores`: that it is bound to; `logs`: file of
    its output."""

    def __init__(
        self,
        client: Client,
        process: asyncio.subprocess.Process | None,
        ports: Ports | None = None,
        cores: Sequence[int] = (),
        logs: Path | None = None,
    ) -> None:
        self.client, self._process, self._ports, self._cores, self._logs = client, process, ports, cores, logs
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reading: asyncio.Task[None] | None = None

    @staticmethod
    async def start(
        config: Config, spec: LaunchSpec, dtype: str, max_length: int, sockets: ServerSockets
    ) -> Server:
        """Starts a server for a node, or attaches to one; `ready` waits for it. Raises StartError."""
        given = config.engine.vllm
        if given.attach is not None:
            return Server(Client(given.attach.rstrip("/"), MODEL, vllm_key()), None)
        logs = Path(given.logs).expanduser() / f"{spec.node}.log" if given.logs is not None else None
        if logs is not None:
            try:
                logs.parent.mkdir(parents=True, exist_ok=True)
                open(logs, "ab", opener=private).close()
            except OSError as error:
                raise StartError(f"engine.vllm.logs {logs}: cannot be written: {error.strerror}") from None
        ports = Ports(2)
        port, side_port = ports.numbers
        settings = environment_of(config, spec, side_port)
        kept = spec.cores if config.engine.device == "cpu" else ()
        python = str(Path(given.python).expanduser()) if given.python is not None else sys.executable
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-m", "vllm.entrypoints.openai.api_server"),
                *arguments_of(config, spec.model, dtype, max_length, port, sockets),
                stdin=DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=settings,
                start_new_session=True,
                preexec_fn=_leave_with(os.getpid(), kept),
            )
        except OSError as error:
            ports.close()
            raise StartError(f"engine.vllm.python {python}: cannot be run: {error.strerror}") from None
        client = Client(f"http://127.0.0.1:{port}", MODEL, settings["VLLM_API_KEY"])
        server = Server(client, process, ports, kept, logs)
        server._reading = asyncio.create_task(server._read())
        return server

    async def ready(self, within_s: float) -> None:
        """Returns when the server answers. Raises StartError if it does not, or ended."""
        until, told = time.monotonic() + within_s, False
        while True:
            if await self.lives():
                if self._process is not None and self._cores:
                    await settle(self._process.pid, self._cores)
                return
            if self._process is not None and self._process.returncode is not None:
                raise StartError(await self._why())
            if time.monotonic() > until:
                raise StartError(
                    f"vLLM at {self.client.url} did not answer within {within_s:g} s (limits.start_s)"
                )
            if self._process is None and not told:
                told = True
                log.warning("waiting for vLLM at %s (engine.vllm.attach)", self.client.url)
            await asyncio.sleep(POLL_S)

    async def lives(self) -> bool:
        """Whether the server is healthy."""
        try:
            await self.client.get("/health")
        except EngineError:
            return False
        return True

    async def ended(self) -> str:
        """Waits until the server is gone; returns why."""
        if self._process is not None:
            await self._process.wait()
            return await self._why()
        missed = 0
        while missed < 3:
            await asyncio.sleep(1.0)
            missed = 0 if await self.lives() else missed + 1
        return f"vLLM at {self.client.url} is gone"

    async def stop(self) -> None:
        """Stops a server that was started here."""
        await self.client.close()
        if self._ports is not None:
            self._ports.close()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                _signal_group(process.pid, signal.SIGKILL)
                await process.wait()
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)  # its children
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Copies the server's output to the log file, and keeps its end for an error."""
        assert self._process is not None and self._process.stdout is not None
        rest = b""
        with open(self._logs or os.devnull, "ab", buffering=0, opener=private) as kept:
            while data := await self._process.stdout.read(READ_BYTES):
                kept.write(data)
                *lines, rest = (rest + data).split(b"\n")
                self._tail += [line[:LINE_BYTES].decode("utf8", "replace").rstrip() for line in lines]
                rest = rest[:LINE_BYTES]
        self._tail += [rest.decode("utf8", "replace")] if rest else []

    async def _why(self) -> str:
        assert self._process is not None
        if self._reading is not None:
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(asyncio.shield(self._reading), 1.0)
        where = f"all it said: {self._logs}" if self._logs is not None else "engine.vllm.logs keeps all it says"
        return f"vLLM ended with exit status {self._process.returncode}: {cause_of(self._tail)[:400]} ({where})"


def cause_of(said: Iterable[str]) -> str:
    """Returns the line of a server's output that tells best why it ended: its processes also report each other's
    failures, without the cause."""
    lines = list(said)
    causes = [
        found[0] for line in lines if (found := _CAUSE.search(line)) and "initialization failed" not in line
    ]
    telling = causes or [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
    return telling[-1].strip()


async def settle(leader: int, cores: Sequence[int]) -> None:
    """Binds all threads of an idle process group to its cores, and lowers the priority of threads that never sleep.

    On CPUs vLLM's NIXL connector moves the computing thread to the machine's last core, where all servers would then
    compute; and a thread of NIXL polls without sleep, on half of a core.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    begun = _thread_seconds(leader)
    await asyncio.sleep(IDLE_S)
    for (process, thread), seconds in _thread_seconds(leader).items():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if not os.sched_getaffinity(thread) <= set(cores):
                os.sched_setaffinity(thread, cores)
            if thread != process and seconds - begun.get((process, thread), seconds) > IDLE_S / 10:
                nice = os.getpriority(os.PRIO_PROCESS, thread) + RESTLESS
                os.setpriority(os.PRIO_PROCESS, thread, min(nice, NICEST))


def _thread_seconds(leader: int) -> dict[tuple[int, int], float]:
    """Returns the processor time of each (process, thread) of a group."""
    found: dict[tuple[int, int], float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(int(process.name)) != leader:
                continue
            for thread in (process / "task").iterdir():
                # After the name in brackets: state, ten numbers, time of its own and in the kernel (proc_pid_stat(5)).
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                found[int(process.name), int(thread.name)] = ticks / os.sysconf("SC_CLK_TCK")
    return found


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _leave_with(parent: int, cores: Sequence[int]) -> Any:
    """Returns a `preexec_fn`: the child ends when this process does, in whatever way, and is bound to `cores`."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare
