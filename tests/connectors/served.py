"""Runs a real vLLM server with the connector, and asks it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PYTHON = os.environ.get("ISTHMUS_VLLM_PYTHON", "")
CORE = os.environ.get("ISTHMUS_VLLM_CORE", "1")
ROOT = Path(__file__).parents[2]
SOURCE = f"{ROOT / 'connectors/vllm/src'}:{ROOT / 'src'}"
"""PYTHONPATH by which a server has the connector, and of isthmus what that imports, as they are here."""


@dataclass(frozen=True)
class Server:
    url: str
    log: Path

    def complete(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, *, n: int = 16
    ) -> list[int]:
        """The tokens of a greedy answer."""
        answer = httpx.post(f"{self.url}/v1/completions", json=body(prompt, params, n), timeout=120)
        answer.raise_for_status()
        return answer.json()["choices"][0]["token_ids"]

    def stream(
        self, prompt: Sequence[int], params: dict[str, Any] | None = None, *, n: int = 16
    ) -> Iterator[int]:
        """The tokens of a greedy answer as they come."""
        asked = body(prompt, params, n) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=120) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield from json.loads(line[6:])["choices"][0]["token_ids"]

    def settle(self) -> None:
        """Waits until there is no request, and no block in use."""
        deadline = time.monotonic() + 20
        while not self.is_idle():
            assert time.monotonic() < deadline, "blocks or requests are left over"
            time.sleep(0.05)

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        self.settle()
        httpx.post(f"{self.url}/reset_prefix_cache").raise_for_status()

    def metric(self, name: str, labels: str = "") -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^vllm:{name}{{[^}}]*{labels}[^}}]*}} (\S+)$", text, re.M)
        return sum(map(float, found))

    def is_idle(self) -> bool:
        """No request, no block in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(name) for name in names)


def body(prompt: Sequence[int], params: dict[str, Any] | None, n: int) -> dict[str, Any]:
    asked = {"model": "m", "prompt": list(prompt), "max_tokens": n, "temperature": 0, "ignore_eos": True}
    asked |= {"return_token_ids": True, "min_tokens": n}
    return asked if params is None else asked | {"kv_transfer_params": params}


@contextmanager
def server(
    model: Path, path: Path, log: Path, *args: str, dtype: str = "float32", **extra: Any
) -> Iterator[Server]:
    """A server for `model` whose connector finds its adapter at `path`."""
    transfer = {
        "kv_connector": "IsthmusConnector",
        "kv_connector_module_path": "isthmus_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(path), **extra},
    }
    with started(model, log, transfer, *args, dtype=dtype) as found:
        yield found


@contextmanager
def started(
    model: Path,
    log: Path,
    transfer: dict[str, Any],
    *args: str,
    core: str = CORE,
    dtype: str = "float32",
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A server for `model` on one `core`, with a `--kv-transfer-config`, if not empty, and more of the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["taskset", "-c", core, PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", "16", "--enforce-eager", "--block-size", "32"]
    command += ["--kv-transfer-config", json.dumps(transfer)] if transfer else []
    command += args
    environment = {
        **os.environ,
        "PYTHONPATH": SOURCE,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_TARGET_DEVICE": "cpu",
        **(env or {}),
    }
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        environment.pop(name, None)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield Server(url, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"vLLM ended with {process.returncode}:\n{log.read_text()[-6000:]}")
        try:
            httpx.get(f"{url}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM does not start:\n{log.read_text()[-6000:]}")
