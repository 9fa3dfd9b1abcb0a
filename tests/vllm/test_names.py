"""`isthmus route --tokenizer` before two stock vLLM servers that publish KV events: the router knows beforehand how
many tokens of each prompt come from a cache.

Run as `test_real_clusters.py`. Nothing of Isthmus is in the servers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.connectors.served import PYTHON, Server, started
from tests.models import make_model
from tests.served import START_S, command

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

BLOCK, NUM_TOKENS = 32, 20
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|eos|>{% endif %}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "é"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    make_model(folder, "llama", num_hidden_layers=2, hidden_size=128, initializer_range=0.15)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, each on a core of its own where there are two."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        found = []
        for number in range(2):
            out, replay = free_ports(2)
            events = {
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": f"tcp://*:{out}", "replay_endpoint": f"tcp://*:{replay}",
            }  # fmt: skip
            options = ["--max-model-len", "2048", "--enable-prompt-tokens-details"]
            options += ["--kv-events-config", json.dumps(events)]
            core = cores[number % len(cores)]
            log = folder / str(number)
            found.append(
                stack.enter_context(started(model, log, {}, *options, core=core, env={"PYTHONPATH": ""}))
            )
        yield found


@contextmanager
def routed(pair: list[Server], model: Path, log: Path) -> Iterator[str]:
    urls = [server.url for server in pair]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command("route", *urls, "--port", "0", "--tokenizer", str(model)),
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: process.poll() is not None or "(ready" in log.read_text())
        yield re.findall(r"routes (http://\S+)", log.read_text())[0]
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def told(url: str, name: str) -> list[int]:
    """A number of each server's, as the router says it."""
    return [each[name] for each in httpx.get(f"{url}/status").json()["servers"]]


def total(url: str, name: str) -> int:
    return sum(told(url, name))


def held(salt: str, tokens: list[int]) -> set[tuple[Any, ...]]:
    """The blocks of a prompt and its answer that a server has then, known by all that they follow from."""
    whole = (len(tokens) - 1) // BLOCK * BLOCK  # the last token is in no cache
    return {(salt, *tokens[:at]) for at in range(BLOCK, whole + 1, BLOCK)}


def asked(draws: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that share beginnings: prompts as text and tokens, conversations, with tools, salted. The ids of a
    conversation's prompt, behind the usage of its answer, are less than the end that the router reads for that."""
    shared = draws.choices(range(97, 123), k=700)
    history = [{"role": "system", "content": bytes(shared[:100]).decode()}]
    for number in range(12):
        alike = draws.randrange(700)
        tokens = shared[:alike] + draws.choices(range(97, 123), k=draws.randrange(5, 300))
        salt = {"cache_salt": "a"} if number % 3 == 2 else {}
        yield "/v1/completions", {"prompt": tokens, **salt}
        yield "/v1/completions", {"prompt": bytes(tokens).decode(), **salt}
        history = [*history, {"role": "user", "content": bytes(tokens[-30:]).decode()}]
        yield "/v1/chat/completions", {"messages": history}
        yield "/v1/chat/completions", {"messages": history, "tools": TOOLS, "tool_choice": "none"}
        history.append({"role": "assistant", "content": "so it is"})


def test_each_prompt_has_as_many_cached_tokens_as_were_expected(
    pair: list[Server], model: Path, tmp_path: Path
) -> None:
    with routed(pair, model, tmp_path / "log") as url:
        seen, blocks_of = [], [set[tuple[Any, ...]](), set[tuple[Any, ...]]()]
        for path, fields in asked(Random(3)):
            before, took = total(url, "expected_tokens_total"), told(url, "requests_total")
            body = {"model": "m", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
            answer = httpx.post(f"{url}{path}", json=body | {"return_token_ids": True}, timeout=120)
            answer.raise_for_status()
            said, (choice,) = answer.json(), answer.json()["choices"]
            cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
            seen.append((total(url, "expected_tokens_total") - before, cached))
            prompt = choice.get("prompt_token_ids") or said["prompt_token_ids"]
            (at,) = [at for at, now in enumerate(told(url, "requests_total")) if now > took[at]]
            blocks_of[at] |= held(fields.get("cache_salt", ""), prompt + choice["token_ids"])
            # Events come a moment after the answer.
            until(lambda: told(url, "cache_blocks") == [len(blocks) for blocks in blocks_of])
        assert seen == [(cached, cached) for _, cached in seen]
        assert sum(cached for _, cached in seen) == total(url, "cached_tokens_total") > 2000
        blocks = total(url, "cache_blocks")
    with routed(pair, model, tmp_path / "again") as url:
        until(lambda: total(url, "cache_blocks") == blocks)  # by the events' replay
        for server in pair:
            server.forget()
            server.complete([100, 101], n=4)  # events come with a step
        until(lambda: total(url, "cache_blocks") == 0)
