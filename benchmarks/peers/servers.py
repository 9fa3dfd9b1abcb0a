"""Servers of OpenAI's API as their users start them: ours, vLLM's and llama.cpp's, each with its own defaults."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.served import last_line, reserved_port
from isthmus.bench import BenchError
from isthmus.core.errors import StartError

START_S = 600.0
"""vLLM compiles the model at its first start on a machine, which takes minutes when that is busy."""
STOP_S = 30.0
POLL_S = 0.1


LLAMA = """
import functools, runpy, sys
from starlette_context import plugins
plugins.RequestIdPlugin = functools.partial(plugins.RequestIdPlugin, validate=False)
sys.argv[0] = "llama_cpp.server"
runpy.run_module("llama_cpp.server", run_name="__main__", alter_sys=True)
"""
"""llama.cpp's server, which by itself answers 400 to a request id that is no UUID, and such are those of the client."""


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


def isthmus(name: str, model: Path, options: list[str]) -> Side:
    command = (sys.executable, "-u", "-m", "isthmus", "serve", "--model", str(model), "--port", "{port}")
    return Side(name, (*command, *options))


def vllm(python: str, model: Path, options: list[str]) -> Side:
    """Its defaults but for three: it is kept from the network, on this machine, and from taking 0.92 of all memory for
    KV, without which it does not start. 1 GiB is more than any row needs."""
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model))
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    settings["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return Side("vllm", (*command, "--host", "127.0.0.1", "--port", "{port}", *options), settings)


def llama(python: str, file: Path, ends: Sequence[int], options: list[str]) -> Side:
    """Its defaults but for three: its context of 2,048 tokens is too short for the longest prompt, a request would end
    the one before it, and one that waits would get pings, of which the client cannot read the end. It does not know
    `ignore_eos`; the end tokens `ends` get a bias in its stead."""
    command = (python, "-c", LLAMA, "--model", str(file), "--host", "127.0.0.1", "--port", "{port}")
    needed = ("--n_ctx", "4096", "--interrupt_requests", "false", "--disable_ping_events", "true")
    bias = {"logit_bias": dict.fromkeys(map(str, ends), -100)}
    return Side("llama.cpp", (*command, *needed, *options), extra=bias)


@contextlib.contextmanager
def running(side: Side, log: Path) -> Iterator[Running]:
    """Started, and stopped with all its processes. Raises StartError with the end of what it said into `log`."""
    begin = time.monotonic()
    with reserved_port() as port:
        with log.open("wb") as sink:
            process = _start(side, port, sink.fileno())
        try:
            url = f"http://127.0.0.1:{port}"
            model = _wait_until_ready(side, process, url, log, begin + START_S)
            yield Running(url, model, time.monotonic() - begin, process.pid)
            if process.poll() is not None:
                raise BenchError(f"{side.name} ended by itself; {log} ends with: {last_line(log.read_text())}")
        finally:
            _stop(process)


def _start(side: Side, port: int, sink: int) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that what it starts can be stopped with it."""
    command = [part.replace("{port}", str(port)) for part in side.command]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=os.environ | side.settings,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"{command[0]}: cannot be run: {error.strerror}") from None


def _wait_until_ready(side: Side, process: subprocess.Popen[bytes], url: str, log: Path, until: float) -> str:
    """The name of its model."""
    with httpx.Client(trust_env=False, timeout=10) as http:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise StartError(
                    f"{side.name} ended at its start; {log} ends with: {last_line(log.read_text())}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if model := _answers(http, url):
                    return model
            time.sleep(POLL_S)
    raise StartError(f"{side.name} did not answer within {START_S:g} s; what it said is in {log}")


def _answers(http: httpx.Client, url: str) -> str | None:
    """The name of its model once it answers a prompt: a list of models may be there long before."""
    listed = http.get(f"{url}/v1/models")
    if listed.status_code != 200:
        return None
    model = str(listed.json()["data"][0]["id"])
    prompt = {"model": model, "prompt": "Hello", "max_tokens": 1}
    return (
        model if http.post(f"{url}/v1/completions", json=prompt, timeout=START_S).status_code == 200 else None
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end, then ends what is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
