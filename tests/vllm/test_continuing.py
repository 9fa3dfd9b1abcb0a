"""Answers of plain vLLM servers that break off and go on at another: the text is that of an undisturbed answer.

Run as `test_real_clusters.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.core.types import PassedRequest, RequestId
from isthmus.live.servers.continuing import answer_to
from tests.connectors.served import PYTHON
from tests.live.servers.test_goes_on import Process, ask, statuses
from tests.models import make_model

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

NUM_TOKENS = 120
START_S = 300
STEP = 13


class VllmServer:
    """A server that nobody prepared for a router."""

    def __init__(self, model: Path, log: Path, core: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        command = [
            "taskset",
            "-c",
            str(core),
            PYTHON,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--enforce-eager",
        ]
        command += [
            "--model",
            str(model),
            "--served-model-name",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_HOST_IP": "127.0.0.1", "VLLM_TARGET_DEVICE": "cpu",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--dtype", "float32"],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self._log.read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    home = tmp_path_factory.mktemp("vllm")
    make_model(home / "model", "llama", num_hidden_layers=4, hidden_size=256, initializer_range=0.15)
    cores = sorted(os.sched_getaffinity(0))
    found = [VllmServer(home / "model", home / f"log-{at}", cores[at % len(cores)]) for at in range(2)]
    try:
        for each in found:
            each.wait()
        yield found
    finally:
        for each in found:
            each.kill()


def asked(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    common = {
        "model": "m", "temperature": 0, "stream": True, "max_tokens": NUM_TOKENS,
        "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    text = f"{number} — a “story” of the sea, 😀"
    if number % 2:
        return "/v1/completions", common | {"prompt": text}
    return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}


KINDS: list[dict[str, Any]] = [
    {},
    {"stop": ["never said", "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"]},
    {"min_tokens": 50, "ignore_eos": True, "logit_bias": {"65": 5}},
    {"temperature": 0.8, "seed": 7, "max_tokens": 40},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "max_tokens": 40},
    {"return_token_ids": True},
]


def streamed(url: str, request: PassedRequest) -> list[bytes]:
    with httpx.stream(
        "POST", url + request.target, content=request.body, headers=dict(request.headers), timeout=120
    ) as answer:
        assert answer.status_code == 200, answer.read()
        return [event + b"\n\n" for event in b"".join(answer.iter_raw()).split(b"\n\n")[:-1]]


def told(stream: bytes) -> tuple[str, list[int], list[Any], dict[str, Any]]:
    """Text, ids, why it ended, and counts."""
    assert stream.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in stream.split(b"\n\n")[:-2]]
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join([each["text"] if "text" in each else each["delta"].get("content", "") for each in choices])
    ids = [token for each in choices for token in each.get("token_ids") or ()]
    ends = [(each["finish_reason"], each.get("stop_reason")) for each in choices if each["finish_reason"]]
    return text, ids, ends, events[-1]["usage"]


def plain(stream: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*"|"created":\d+', b"", stream)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_an_answer_cut_at_any_event_is_whole(
    servers: list[VllmServer], fields: dict[str, Any], number: int
) -> None:
    path, body = asked(number, **fields)
    headers = (("Content-Type", "application/json"),)
    passed = PassedRequest(
        RequestId("r"), "POST", path, headers, json.dumps(body).encode(), "m", is_streamed=True
    )
    alone = b"".join(streamed(servers[0].url, passed))

    def attempt(server: VllmServer) -> list[bytes]:
        request = answer.request_to("vllm")
        assert request is not None
        return streamed(server.url, request)

    for cut in range(0, body["max_tokens"], STEP):  # the stream has more events than tokens
        answer = answer_to(passed)
        assert answer is not None
        events = attempt(servers[0])
        if cut == 0:
            assert plain(b"".join(map(answer.take, events))) == plain(alone), "the stream as it was"
            continue
        got = b"".join(map(answer.take, events[:cut]))
        got += b"".join(map(answer.take, attempt(servers[1])))
        assert answer.error is None, (cut, answer.error)
        assert told(got) == told(alone), cut


def test_a_killed_server_costs_time_and_no_token(servers: list[VllmServer], tmp_path: Path) -> None:
    router = Process(tmp_path / "router", "route", "--port", "0", *[server.url for server in servers])
    try:
        until = time.monotonic() + START_S
        while (found := re.search(r"routes (\S+) to", router.log.read_text())) is None:
            assert time.monotonic() < until and router.process.poll() is None, router.log.read_text()
            time.sleep(0.05)
        requests = [asked(number, ignore_eos=True, max_tokens=400) for number in range(8)]
        expected = [ask(servers[0].url, path, body) for path, body in requests]
        begun = [threading.Event() for _ in requests]
        with ThreadPoolExecutor(8) as pool:
            answers = [
                pool.submit(ask, found[1], path, body, event)
                for (path, body), event in zip(requests, begun, strict=True)
            ]
            assert all(event.wait(START_S) for event in begun)
            busy = max(statuses(found[1]), key=lambda each: each["requests_running"])
            next(server for server in servers if server.url == busy["server"]).kill()
            assert [answer.result() for answer in answers] == expected
        assert sum(each["continued_total"] for each in statuses(found[1])) >= 1
    finally:
        router.kill()
