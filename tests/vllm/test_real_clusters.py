"""Whole clusters of real vLLM servers against one such server alone: greedy tokens must be equal.

Run with ISTHMUS_VLLM_PYTHON set to the Python of an environment that has vLLM 0.32, what `isthmus-vllm` needs, and nixl
(`make test-vllm`). The weights of the model are so wide that KV of other tokens gives other tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests import served as serving
from tests.connectors.served import PYTHON, SOURCE, server
from tests.live.servers.fake_server import two_ports
from tests.models import EOS, make_model
from tests.served import Served, children_of, node_pid, serve, streamed

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

NUM_TOKENS = 12
PROMPTS = 40
LONGEST = 1500
BLOCK = 32
NIXL = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_buffer_device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_model(folder, "llama", num_hidden_layers=4, hidden_size=256, initializer_range=0.15)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of log-uniform lengths; half of them begin alike."""
    draws = Random(5)
    shared = draws.choices(range(3, 250), k=LONGEST)
    found = []
    for number in range(PROMPTS):
        length = int(5 * (LONGEST / 5) ** draws.random())
        alike = draws.randrange(length + 1) if number % 2 else 0
        found.append(shared[:alike] + draws.choices(range(3, 250), k=length - alike))
    return found


@pytest.fixture(scope="module")
def expected(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What the server alone says."""
    folder = tmp_path_factory.mktemp("alone")
    with server(model, folder / "nobody", folder / "log") as alone:
        return [alone.complete(prompt, n=NUM_TOKENS) for prompt in prompts]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "START_S", 300)


def settings(model: Path, transfer: str, **others: Any) -> dict[str, Any]:
    env = {"PYTHONPATH": SOURCE, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    engine: dict[str, Any] = {
        "kind": "vllm", "device": "cpu", "block_size": BLOCK, "kv_memory": "256MiB", "max_length": 2048,
        "vllm": {"python": PYTHON, "transfer": transfer, "env": env},
    }  # fmt: skip
    cache = {"cache": {"dram": "256MiB"}} if transfer == "pool" else {}
    return {"model": str(model), "engine": engine, "limits": {"start_s": 300}} | cache | others


def ask_all(served: Served, prompts: list[list[int]]) -> list[list[int]]:
    """Eight at once, every second one streamed."""

    def ask(at: int) -> list[int]:
        if at % 2:
            return streamed(served, prompts[at], NUM_TOKENS, threading.Event(), ignore_eos=True)
        return served.tokens(prompts[at], NUM_TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(len(prompts))))


@pytest.mark.parametrize("transfer", ["pool", "nixl"])
def test_prefill_and_decode_say_what_one_server_says(
    transfer: str, model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with serve(tmp_path, settings(model, transfer, roles={"prefill": 1, "decode": 1})) as served:
        assert ask_all(served, prompts) == expected
        longest = max(range(PROMPTS), key=lambda at: len(prompts[at]))
        again = served.complete(prompts[longest], NUM_TOKENS, ignore_eos=True)
        assert again["choices"][0]["token_ids"] == expected[longest]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= (len(prompts[longest]) - 1) // BLOCK * BLOCK
        assert served.total("seal_mismatches_total") == 0
        if transfer == "pool":
            moved = served.gauge("vllm_blocks_loaded_total")
            assert moved["decode-0"] > 0 and served.gauge("vllm_blocks_saved_total")["prefill-0"] > 0


def test_what_was_computed_is_loaded_after_a_restart(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    cache = {"dram": "64MiB", "ssd": "256MiB", "folder": str(tmp_path / "blocks")}
    deployment = settings(model, "pool", roles={"prefill": 0, "decode": 0, "mixed": 1}, cache=cache)
    with serve(tmp_path, deployment) as served:
        assert ask_all(served, prompts) == expected
    with serve(tmp_path, deployment) as served:
        assert ask_all(served, prompts) == expected
        assert served.total("vllm_blocks_loaded_total") > 0 < served.total("prefix_cache_hits_total")


def test_killed_servers_cost_time_and_no_token(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """The server of each node once, while others are answering; who is refused meanwhile asks again."""
    with serve(tmp_path, settings(model, "pool", roles={"prefill": 1, "decode": 1})) as served:
        for node in ("prefill-0", "decode-0"):
            assert answers_amid_a_kill(served, prompts, node) == expected
            served.check_idle()


def answers_amid_a_kill(served: Served, prompts: list[list[int]], node: str) -> list[list[int]]:
    answers: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        body = {
            "model": served.model, "prompt": prompts[number], "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        served.wait_until(lambda: _took(served, body, number, answers), f"{node} is back")

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(PROMPTS)]
        served.wait_until(lambda: len(answers) >= 4, "some are answered")
        (server_pid,) = children_of(node_pid(children_of(served.process.pid), node))
        os.kill(server_pid, signal.SIGKILL)
        for each in asked:
            each.result()
    return [answers[number] for number in range(len(prompts))]


def _took(served: Served, body: dict[str, Any], number: int, answers: dict[int, list[int]]) -> bool:
    reply = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300)
    if reply.status_code == 503:
        return False
    assert reply.status_code == 200, reply.text
    answers[number] = reply.json()["choices"][0]["token_ids"]
    return True


def test_a_server_is_attached_to_that_shares_nothing_but_the_network(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Without a pool; whatever its names and its blocks. It says through the cluster what it says itself."""
    with two_ports() as port, contextlib.ExitStack() as stack:
        events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}"}
        args = ["--kv-transfer-config", json.dumps(NIXL), "--kv-events-config", json.dumps(events)]
        args += ["--served-model-name", "theirs", "m", "--block-size", "64", "--max-model-len", "2048"]
        args += ["--enable-prompt-tokens-details"]
        alone = stack.enter_context(server(model, tmp_path / "nobody", tmp_path / "log", *args))
        expected = [alone.complete(prompt, n=NUM_TOKENS) for prompt in prompts]
        deployment = settings(model, "nixl", roles={"prefill": 0, "decode": 0, "mixed": 1})
        del deployment["engine"]["block_size"]
        deployment["engine"]["vllm"] = {
            "transfer": "nixl", "attach": alone.url, "sockets": f"tcp://127.0.0.1:{port}",
        }  # fmt: skip
        served = stack.enter_context(serve(tmp_path, deployment))
        assert ask_all(served, prompts) == expected
        assert served.total("kv_blocks_cached") > 0 < served.total("prefix_cache_hits_total")


def test_grammars_hold_when_their_server_dies(prompts: list[list[int]], tmp_path: Path) -> None:
    """With blocks of the size that vLLM chooses, and a model that has an end token."""
    model = tmp_path / "ends"
    make_model(model, "llama", num_hidden_layers=4, hidden_size=256, initializer_range=0.15, eos_token_id=EOS)
    tokenizer = model / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"eos_token": "<|eos|>"}))
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    call = {"type": "function", "function": {"name": "f", "parameters": schema}}
    deployment = settings(model, "pool", roles={"prefill": 1, "decode": 1})
    del deployment["engine"]["block_size"]
    deployment["limits"] |= {"rejoin_s": 300}
    letters = {"structured_outputs": {"regex": "[a-z ]{300}"}, "ignore_eos": True}
    with serve(tmp_path, deployment) as served:
        prompt = max(prompts, key=len)
        *answer, end = served.tokens(prompt, 300, response_format=form)
        assert end == EOS and json.loads(bytes(answer)).keys() == {"age"}
        asked = {"tool_choice": "required", "tools": [call], "max_tokens": 300, "temperature": 0}
        message = {"role": "user", "content": "?"}
        reply = served.http.post(
            "/v1/chat/completions", json={"messages": [message], "model": served.model, **asked}
        )
        assert reply.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f", reply.text
        expected = served.tokens(prompt, 400, **letters)
        assert re.fullmatch("[a-z ]{300}", bytes(expected[:-1]).decode()) and expected[-1] == EOS
        assert served.gauge("vllm_blocks_loaded_total")["decode-0"] > 0
        answering = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(streamed, served, prompt, 400, answering, **letters)
            answering.wait()
            (server_pid,) = children_of(node_pid(children_of(served.process.pid), "decode-0"))
            os.kill(server_pid, signal.SIGKILL)
            assert found.result() == expected
