"""Processes that a study starts, waits for and ends: servers of OpenAI's API as their users start them, and others.

Ours, vLLM's and llama.cpp's servers have their own defaults.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from isthmus.bench import BenchError
from isthmus.core.errors import StartError

Value = TypeVar("Value")

START_S = 600.0
"""vLLM compiles the model at its first start on a machine, which takes minutes when that is busy."""
STOP_S = 60.0
POLL_S = 0.05

LLAMA = """
import functools, runpy, sys
from starlette_context import plugins
plugins.RequestIdPlugin = functools.partial(plugins.RequestIdPlugin, validate=False)
sys.argv[0] = "llama_cpp.server"
runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)
"""
"""llama.cpp's server, which by itself answers 400 to a request id that is no UUID, and such are those of the client."""


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    log: Path,
    ready: Callable[[], Value | None],
    *,
    settings: Mapping[str, str] | None = None,
    start_s: float = START_S,
) -> Iterator[tuple[Value, int]]:
    """Starts a process and yields the first value of `ready` and the process id; ends it with all its children.

    `settings` join the environment. Raises StartError, with the last line of `log`, if it ends or is not ready within
    `start_s`; BenchError if it ended by itself in the meantime.
    """
    until = time.monotonic() + start_s
    with log.open("wb") as sink:
        process = _started(command, sink.fileno(), settings or {})
    try:
        while (found := ready()) is None:
            if process.poll() is not None:
                raise StartError(f"{name} ended at its start; {log} ends with: {last_line(log)}")
            if time.monotonic() > until:
                raise StartError(f"{name} did not answer within {start_s:g} s; what it said is in {log}")
            time.sleep(POLL_S)
        yield found, process.pid
        if process.poll() is not None:
            raise BenchError(f"{name} ended by itself; {log} ends with: {last_line(log)}")
    finally:
        _stop(process)


def _started(command: Sequence[str], sink: int, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process group, so that children can be stopped with their parent."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{command[0]}: cannot be run: {error.strerror}") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the process, then kills the rest of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host, for a server that is to listen there: nobody else is given it meanwhile."""
    with socket.socket() as holder:
        # A server that says so, too, may listen there.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def served(config: Path, log: Path, start_s: float = 90.0) -> Iterator[tuple[str, int]]:
    """`isthmus serve` with a configuration file: its URL and process id, once it is ready."""

    def ready() -> str | None:
        found = re.search(r" at (http://\S+) with ", log.read_text())
        return found[1] if found else None

    command = (sys.executable, "-u", "-m", "isthmus", "serve", "--config", str(config))
    with started("isthmus serve", command, log, ready, start_s=start_s) as found:
        yield found


@dataclass(frozen=True)
class Side:
    """How to start one server: `{port}` stands for the port in the command, `settings` join the environment.

    `extra`: fields that each request for it has beside those of all.
    """

    name: str
    command: tuple[str, ...]
    settings: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Running:
    """A server that answers. `ready_s`: from its start to its first answer; `pid`: of its first process."""

    url: str
    model: str
    ready_s: float
    pid: int


def isthmus(name: str, model: Path, options: Sequence[str]) -> Side:
    command = (sys.executable, "-u", "-m", "isthmus", "serve", "--model", str(model), "--port", "{port}")
    return Side(name, (*command, *options))


def vllm(python: str, model: Path, options: Sequence[str]) -> Side:
    """Its defaults but for three: it is kept from the network, on this machine, and from taking 0.92 of all memory for
    KV, without which it does not start. 1 GiB is more than any row needs."""
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    settings["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return Side("vllm", (*command, "--host", "127.0.0.1", "--port", "{port}", *options), settings)


def llama(python: str, file: Path, ends: Sequence[int], options: Sequence[str]) -> Side:
    """Its defaults but for three: its context of 2,048 tokens is too short for the longest prompt, a request would end
    the one before it, and one that waits would get pings, of which the client cannot read the end. It does not know
    `ignore_eos`; the end tokens `ends` get a bias in its stead."""
    command = (python, "-c", LLAMA, "--model", str(file), "--host", "127.0.0.1", "--port", "{port}")
    needed = ("--n_ctx", "4096", "--interrupt_requests", "false", "--disable_ping_events", "true")
    bias = {"logit_bias": dict.fromkeys(map(str, ends), -100)}
    return Side("llama.cpp", (*command, *needed, *options), extra=bias)


@contextlib.contextmanager
def running(side: Side, log: Path) -> Iterator[Running]:
    begin = time.monotonic()
    with reserved_port() as port, httpx.Client(trust_env=False, timeout=10) as http:
        command = [part.replace("{port}", str(port)) for part in side.command]
        url = f"http://127.0.0.1:{port}"
        ready = partial(_answers, http, url)
        with started(side.name, command, log, ready, settings=side.settings) as (model, pid):
            yield Running(url, model, time.monotonic() - begin, pid)


def _answers(http: httpx.Client, url: str) -> str | None:
    """The name of its model once it answers a prompt: a list of models may be there long before."""
    try:
        listed = http.get(f"{url}/v1/models")
        if listed.status_code != 200:
            return None
        model = str(listed.json()["data"][0]["id"])
        prompt = {"model": model, "prompt": "Hello", "max_tokens": 1}
        answer = http.post(f"{url}/v1/completions", json=prompt, timeout=START_S)
        return model if answer.status_code == 200 else None
    except httpx.HTTPError:
        return None
