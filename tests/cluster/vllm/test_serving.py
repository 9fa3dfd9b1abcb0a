"""Whole clusters whose nodes have vLLM servers, stood in for by `fake_server.py`: what a user sees, and what they see.

Tokens are digests of all before them and of the KV that was used, so each exact answer says that all of that was right.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import make_model
from tests.served import Served, node_pid, serve, streamed

from .fake_server import expected_tokens, stand_in, url_of

KINDS = ["pool", "nixl"]
SHAPES: dict[str, dict[str, int]] = {
    "mixed": {"mixed": 1, "prefill": 0, "decode": 0},
    "1P1D": {"prefill": 1, "decode": 1},
    "2P1D": {"prefill": 2, "decode": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    make_model(folder, "llama")
    return folder


class Cluster:
    """`served`, and the servers of its nodes."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self._folder = served, folder

    def url(self, node: str) -> str:
        found = url_of(self._folder, node_pid(self.served.children().values(), node))
        assert found is not None
        return found

    def counts(self, node: str) -> dict[str, int]:
        return httpx.get(f"{self.url(node)}/counts").json()

    def fault(self, node: str, **fault: float) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):  # one that ends it
            httpx.post(f"{self.url(node)}/fault", json=fault).raise_for_status()

    def total(self, name: str) -> int:
        return sum(self.counts(node).get(name, 0) for node in self.served.gauge("kv_blocks"))

    def check(self) -> None:
        """No KV was used that was not the right one, and nothing is held for anybody."""
        for name in ("wrong_blocks", "reads_of_nothing", "params_lost", "running", "kept_now"):
            self.served.wait_until(lambda name=name: not self.total(name), f"no {name}")  # type: ignore[misc]


@contextlib.contextmanager
def cluster(home: Path, model: Path, kind: str, shape: str, **limits: float) -> Iterator[Cluster]:
    engine = {
        "kind": "vllm",
        "device": "cpu",
        "kv_memory": "8MiB",
        "vllm": {"transfer": kind, "env": stand_in(home)},
    }
    settings: dict[str, Any] = {
        "model": str(model), "engine": engine, "roles": SHAPES[shape], "limits": limits
    }  # fmt: skip
    if kind == "pool":
        settings["cache"] = {"dram": "16MiB"}
    with serve(home, settings) as served:
        yield Cluster(served, home)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_server(kind: str, shape: str, model: Path, tmp_path: Path) -> None:
    """One by one and eight at once; what was computed before is not computed again."""
    with cluster(tmp_path, model, kind, shape) as found:
        served = found.served
        prompts = [[number, *range(1, 20 + 9 * number)] for number in range(1, 9)]
        expected = [expected_tokens(prompt, 20) for prompt in prompts]
        assert served.tokens(prompts[7], 20) == expected[7]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda prompt: served.tokens(prompt, 20), prompts)) == expected
        answer = served.complete(prompts[7], 20)
        assert answer["choices"][0]["token_ids"] == expected[7]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        found.check()
