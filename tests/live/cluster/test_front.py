"""The HTTP front of `isthmus serve`: strangers beside nodes, HTTPS by two flags, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.served import LIMIT_S, POLL_S, alive, command, serve

EMULATED: dict[str, Any] = {
    "engine": {"kind": "emulated", "hardware": "h200"},
    "roles": {"prefill": 1, "decode": 1},
}

CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.05}
SLOW = EMULATED | {"engine": {"kind": "emulated", "cost": CURVE}}


def test_https_by_two_flags(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "https")
    certificate, key = files["certificate"], files["key"]
    arguments = ("--engine", "emulated", "--hardware", "h200", "--mixed", "1")

    def status(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("status", "--url", served.url, "--json"),
            capture_output=True,
            text=True,
            env=os.environ | environment,
            timeout=LIMIT_S,
            check=False,
        )

    with serve(tmp_path, None, *arguments, "--tls-certificate", certificate, "--tls-key", key) as served:
        assert served.url.startswith("https://127.0.0.1:")
        assert len(served.tokens([1, 2], 3)) == 3
        trusted = status({"SSL_CERT_FILE": files["authority"]})
        assert trusted.returncode == 0 and json.loads(trusted.stdout)["healthy"]
        [line] = status({}).stderr.splitlines()
        assert line.endswith("name the file of its certificate's authority in SSL_CERT_FILE")


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
def test_answers_that_outlast_the_server_end_in_their_own_form(tmp_path: Path, how: str) -> None:
    limits = {"drain_s": 0.5 if how == "the time is over" else 600}
    asked = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True}
    begun = threading.Event()

    def stream() -> list[str]:
        body = {"model": served.model, **asked, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = []
            for line in reply.iter_lines():
                begun.set()
                lines.append(line)
        return [line for line in lines if line]

    with serve(tmp_path, SLOW | {"limits": limits}) as served, ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(stream)
        plain = pool.submit(served.http.post, "/v1/completions", json={"model": served.model, **asked})
        assert begun.wait(LIMIT_S)
        served.wait_until_asked(2)
        children = list(served.children().values())
        served.process.send_signal(signal.SIGTERM)
        if how == "a second signal":
            until = time.monotonic() + LIMIT_S
            while "stopping: " not in served.story():
                assert time.monotonic() < until
                time.sleep(POLL_S)
            served.process.send_signal(signal.SIGTERM)
        *_, error, done = streaming.result(LIMIT_S)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"
        answer = plain.result(LIMIT_S)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"
        assert served.process.wait(LIMIT_S) == 0
        assert "Traceback" not in served.story() and not [pid for pid in children if alive(pid)]
