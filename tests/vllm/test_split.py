"""`isthmus route --prefill --decode` before two stock vLLM servers that hand KV over by NIXL: greedy tokens are those
of one server alone.

Run as `test_real_clusters.py`. Nothing of Isthmus is in the servers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.servers import split
from tests.connectors.served import PYTHON, Server, body, started
from tests.models import make_model
from tests.served import START_S, command

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

PROMPTS, LONGEST, NUM_TOKENS = 200, 900, 12
BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_model(folder, "llama", num_hidden_layers=4, hidden_size=256, initializer_range=0.15)
    return folder


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode server, each on a core of its own where there are two."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        found = []
        for number, name in enumerate(("prefill", "decode")):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            env = {
                "UCX_TLS": "tcp",
                "UCX_NET_DEVICES": "lo",
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                "PYTHONPATH": "",
            }
            core = cores[number % len(cores)]
            found.append(
                stack.enter_context(started(model, folder / name, transfer, "--max-model-len", "2048",
                             "--enable-prompt-tokens-details", core=core, env=env))
            )  # fmt: skip
        yield found[0], found[1]


@contextmanager
def routed(pair: tuple[Server, Server], log: Path, *options: str) -> Iterator[str]:
    prefill, decode = pair
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command("route", "--prefill", prefill.url, "--decode", decode.url, "--port", "0", *options),
            stdout=sink, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while "(ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        assert log.read_text().count("(Nixl)") == 2
        yield log.read_text().split(" routes ")[1].split()[0]
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def prompts() -> list[list[int]]:
    """Of log-uniform lengths; half of them begin alike."""
    draws = Random(7)
    shared = draws.choices(range(3, 250), k=LONGEST)
    found = []
    for number in range(PROMPTS):
        length = int(3 * (LONGEST / 3) ** draws.random())
        alike = draws.randrange(length + 1) if number % 2 else 0
        found.append(shared[:alike] + draws.choices(range(3, 250), k=length - alike))
    return found


def ask(server: Server, prompt: list[int], number: int) -> list[int]:
    if number % 2:
        return server.complete(prompt, n=NUM_TOKENS)
    return list(server.stream(prompt, n=NUM_TOKENS))


def ask_all(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda each: ask(server, each[1], each[0]), enumerate(prompts())))


def test_tokens_are_those_of_one_server(pair: tuple[Server, Server], tmp_path: Path) -> None:
    prefill, decode = pair
    expected = ask_all(prefill)
    prefill.forget()
    before = decode.metric("prompt_tokens_total")
    computed = decode.metric("prompt_tokens_by_source_total", 'source="local_compute"')
    with routed(pair, tmp_path / "log", "--threshold", "0") as url:
        assert ask_all(Server(url, tmp_path / "log")) == expected
        status = {each["role"]: each for each in httpx.get(f"{url}/status").json()["servers"]}
        assert status["prefill"]["failures_total"] == status["decode"]["failures_total"] == 0
        assert status["prefill"]["requests_total"] == status["decode"]["requests_total"] == PROMPTS
    for server in pair:
        server.settle()  # no KV is kept
    num_tokens = decode.metric("prompt_tokens_total") - before
    own = decode.metric("prompt_tokens_by_source_total", 'source="local_compute"') - computed
    assert num_tokens == sum(map(len, prompts())) and own < num_tokens / 10, (own, num_tokens)


def test_kv_that_is_released_is_free_before_its_lease_ends(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    asked = split.Nixl().asked()
    sent: dict[str, Any] = body(list(range(3, 250)) * 3, None, 5)
    passed = PassedRequest(RequestId("r"), "POST", "/v1/completions", (), json.dumps(sent).encode(), "m")
    fields = split.read(passed)
    assert fields is not None and fields.divides
    leg = split.prefill_leg(passed, fields, asked)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(prefill.url + leg.target, content=leg.body, headers=headers, timeout=60)
    params = split.computed(answer.content, asked).params
    assert prefill.metric("kv_cache_usage_perc") > 0
    released = split.release(params)
    refused = httpx.post(decode.url + released.target, content=released.body, headers=headers, timeout=60)
    assert refused.status_code == 404
    began = time.monotonic()
    prefill.settle()
    assert time.monotonic() - began < 10, "the lease is 30 s"
