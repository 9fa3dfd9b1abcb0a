"""The connector in a real vLLM server, against an adapter that is a dictionary.

Run with ISTHMUS_VLLM_PYTHON set to the Python of an environment that has vLLM 0.32 and what the connector needs, and
ISTHMUS_VLLM_CORE to the CPU core that the server may use. The model is tiny, and its weights so wide that KV of
other tokens gives other tokens: equal answers mean that the KV was right.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import blake3
import httpx
import pytest
import torch

from isthmus.live.servers.wire import Done, Load, Open, Over, Save
from isthmus_vllm.plans import Chain
from tests.models import make_model

from .adapter import Adapter
from .served import PYTHON, SOURCE, Server, body, server

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="ISTHMUS_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

BLOCK = 32
KEY = blake3.blake3(b"the tests' namer").digest()


def prompt(seed: int, length: int = 500) -> list[int]:
    return Random(seed).choices(range(256), k=length)


def params(key: str, blocks: int) -> dict[str, Any]:
    return {"isthmus": {"v": 1, "key": key, "blocks": blocks, "namer": KEY.hex()}}


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_key_value_heads": 2, "intermediate_size": 512}
    make_model(folder, "llama", initializer_range=0.15, **shape)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter") / "s"


@pytest.fixture(scope="module")
def vllm(model: Path, place: Path) -> Iterator[Server]:
    with server(model, place, place.with_name("log"), "--max-model-len", "4096", timeout_s=20) as made:
        yield made


@pytest.fixture
def adapter(place: Path, vllm: Server) -> Iterator[Adapter]:
    with Adapter(place) as made:
        until(lambda: made.of(Open))
        yield made
        vllm.settle()
    assert not made.errors


def stored(vllm: Server, adapter: Adapter, seed: int) -> tuple[list[int], list[int]]:
    """A prompt whose blocks the adapter has and vLLM has not, and its answer."""
    tokens = prompt(seed)
    vllm.forget()
    answer = vllm.complete(tokens, params("first", 0))
    until(lambda: adapter.of(Over))
    assert len(adapter.blocks) == 16
    vllm.forget()
    adapter.messages = adapter.of(Open)
    return tokens, answer


def test_without_a_ticket_or_with_an_ill_formed_one_nothing_happens(vllm: Server, adapter: Adapter) -> None:
    tokens = prompt(2)
    answer = vllm.complete(tokens)
    for wrong in ({"isthmus": {"v": 2}}, {"isthmus": 3}, {"other": {}}):
        vllm.forget()
        assert vllm.complete(tokens, wrong) == answer
    assert adapter.messages == adapter.of(Open)
    assert vllm.log.read_text().count("ill-formed") in (1, 2)  # once for each way


def test_a_damaged_page_is_computed_again_and_mended(vllm: Server, adapter: Adapter) -> None:
    tokens, answer = stored(vllm, adapter, 5)
    adapter.damaged.add(Chain(KEY, BLOCK).names(tokens, 0, 8)[-1])
    assert vllm.complete(tokens, params("second", 15)) == answer
    until(lambda: adapter.of(Over))
    assert len(adapter.of(Load)) == len(adapter.of(Done)) == 1
    assert adapter.of(Save)[0].first == 0 and not adapter.damaged


def test_an_abort_in_a_load_leaves_nothing_behind(vllm: Server, adapter: Adapter) -> None:
    tokens, answer = stored(vllm, adapter, 9)
    adapter.lag_s = 1.0
    with pytest.raises(httpx.TimeoutException):  # the client goes away between two pieces of the load
        httpx.post(f"{vllm.url}/v1/completions", json=body(tokens, params("second", 15), 16), timeout=1.5)
    until(lambda: adapter.of(Done) and adapter.of(Over), 1.5)  # the other pieces would take longer
    assert len(adapter.of(Load)) == 1
    vllm.settle()
    adapter.lag_s = 0
    assert vllm.complete(tokens, params("third", 15)) == answer


DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'


@pytest.mark.parametrize("drafts", [(), ("--speculative-config", DRAFTS)], ids=["", "drafts"])
def test_preemption_meets_saves(tmp_path: Path, model: Path, drafts: tuple[str, ...]) -> None:
    """Few blocks and many requests: each stored page is the one that the same tokens alone give, but for rounding, and
    the answers are right. With drafts too, most of which are rejected after their KV was written."""
    prompts = {seed: prompt(seed, 200) for seed in range(20, 28)}
    with Adapter(tmp_path / "s") as adapter:
        few = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40")
        with server(model, adapter.path, tmp_path / "log", *few, *drafts) as vllm:
            alone = {}
            for seed, tokens in prompts.items():
                vllm.forget()
                alone[seed] = vllm.complete(tokens, params(f"alone {seed}", 0), n=150)
            until(lambda: len(adapter.of(Over)) == len(prompts))
            expected, adapter.blocks = adapter.blocks, {}
            assert len(expected) == len(prompts) * ((200 + 149) // BLOCK)
            vllm.forget()
            with ThreadPoolExecutor(len(prompts)) as clients:
                asked = {
                    seed: clients.submit(vllm.complete, tokens, params(f"together {seed}", 0), n=150)
                    for seed, tokens in prompts.items()
                }
            assert {seed: answer.result() for seed, answer in asked.items()} == alone
            vllm.settle()
            assert vllm.metric("num_preemptions_total") > 0
            assert bool(drafts) == bool(vllm.metric("spec_decode_num_draft_tokens_total"))
            until(lambda: len(adapter.of(Over)) == 2 * len(prompts))
        assert not adapter.errors
        assert set(adapter.blocks) == set(expected)
        assert max(difference(adapter.blocks[name], expected[name]) for name in expected) < 1e-3


def difference(block: list[bytes], other: list[bytes]) -> float:
    """The largest difference of two blocks' numbers, as a part of the largest number of the layer."""
    layers = [
        (
            torch.frombuffer(bytearray(ours), dtype=torch.float32),
            torch.frombuffer(bytearray(theirs), dtype=torch.float32),
        )
        for ours, theirs in zip(block, other, strict=True)
    ]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in layers)


CONFIGS = """
from types import SimpleNamespace as Some
import torch
from isthmus_vllm.connector import refusal
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

spec = dict(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
full, window = FullAttentionSpec(**spec), SlidingWindowSpec(**spec, sliding_window=64)

def tell(draft=None, specs=(full,), **changes):
    transfer = dict(kv_load_failure_policy="recompute", is_kv_producer=True, is_kv_consumer=True)
    transfer |= dict(kv_connector_extra_config={"socket": "/s"})
    parallel = dict(world_size=1, data_parallel_size=1, decode_context_parallel_size=1)
    for name, value in changes.items():
        (parallel if name in parallel else transfer)[name] = value
    method = None if draft is None else Some(method=draft)
    config = Some(kv_transfer_config=Some(**transfer), parallel_config=Some(**parallel), speculative_config=method)
    print(refusal(config, Some(kv_cache_groups=[Some(kv_cache_spec=one) for one in specs])))

tell()
tell(draft="ngram")
tell(kv_load_failure_policy="fail")
tell(is_kv_consumer=False)
tell(kv_connector_extra_config={})
tell(kv_connector_extra_config={"socket": "/s", "sockets": 1})
tell(world_size=2)
tell(data_parallel_size=2)
tell(decode_context_parallel_size=2)
tell(specs=(full, full))
tell(specs=(window,))
tell(specs=(FullAttentionSpec(**spec, non_causal=True),))
tell(draft="eagle")
"""


def test_what_cannot_be_right_is_refused_at_the_start() -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "VLLM_TARGET_DEVICE": "cpu"}
    told = subprocess.run(
        [PYTHON, "-c", CONFIGS], env=environment, capture_output=True, text=True, check=True
    ).stdout
    lines = told.splitlines()[-13:]
    assert lines[:2] == ["None", "None"]
    words = [
        "recompute",
        "kv_both",
        "socket",
        "sockets",
        "rank",
        "rank",
        "rank",
        "group",
        "group",
        "group",
        "eagle",
    ]
    assert all(word in line for word, line in zip(words, lines[2:], strict=True)), told
