"""Requests whose KV lies on several nodes: through the API, with the tokens of transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from isthmus.cli.models import bytes_folder
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from isthmus.live.engine.turns import Turns
from tests.inside import inside
from tests.live.cluster.test_deaths import kill
from tests.live.cluster.test_exact_hybrid import layout_of
from tests.live.cluster.test_exact_pool import SLOW, prompt_of
from tests.live.engine.hybrids import save_tiny
from tests.models import check_greedy, make_model
from tests.served import LIMIT_S, Client, serve, streamed

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
NODE_BLOCKS = 12
"""Memory of a node: 192 tokens."""
ROLES = {
    "four": {"prefill": 0, "decode": 0, "mixed": 4},
    "2P2D": {"prefill": 2, "decode": 2, "mixed": 0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("holders") / "model"
    make_model(folder, "llama")
    return folder


def deployment(model: Path, roles: dict[str, int], **fields: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "roles": roles,
        "engine": {
            "cost": SLOW, "token_budget": 64, "kv_memory": NODE_BLOCKS * BLOCK_BYTES, "max_sequences": 4
        },
        "cache": {"dram": 0},
    } | fields  # fmt: skip


def ask(served: Client, model: Path, prompt: list[int], num_tokens: int) -> None:
    answer = served.tokens(prompt, num_tokens, ignore_eos=True)
    assert len(answer) == num_tokens
    check_greedy(model, prompt, answer)


@pytest.mark.parametrize(("name", "length"), [("four", 3.5), ("2P2D", 2.6)])
def test_the_longest_context_is_that_of_all_nodes_together(name: str, length: float, model: Path) -> None:
    total = int(length * NODE_BLOCKS * 16)
    with inside(deployment(model, ROLES[name])) as served:
        ask(served, model, prompt_of(1, total - 30), 30)
        served.wait_until(lambda: served.total("attention_asked_total") > 0, "questions")
        ask(served, model, prompt_of(2, 40), 20)
        for _ in range(3):
            ask(served, model, prompt_of(3, total - 20), 8)
        served.wait_until(
            lambda: served.total("kv_blocks_available") == served.total("kv_blocks"), "all came back"
        )


@pytest.mark.parametrize("name", list(ROLES))
def test_long_and_short_requests_together(name: str, model: Path) -> None:
    prompts = [prompt_of(at, length) for at, length in enumerate((20, 300, 60, 100, 250, 33, 280, 90))]
    with inside(deployment(model, ROLES[name])) as served, ThreadPoolExecutor(8) as pool:
        with served.held():
            asked = [pool.submit(ask, served, model, prompt, 24) for prompt in prompts]
            served.wait_until_asked(len(prompts))
        for each in asked:
            each.result()


@pytest.mark.parametrize("name", ["one", "2P2D"])
def test_nodes_without_weights_attend(name: str, model: Path) -> None:
    """Two of them have the KV of every prompt; the others' memory is small."""
    roles = {"one": {"prefill": 0, "decode": 0, "mixed": 1}, "2P2D": {"prefill": 2, "decode": 2}}[name]
    attention = {"count": 2, "kv_memory": 60 * BLOCK_BYTES}
    prompts = [prompt_of(at, length) for at, length in enumerate((1, 16, 17, 400, 60, 700, 33, 280, 90))]
    with inside(deployment(model, roles | {"attention": attention})) as served:
        for prompt in prompts:
            ask(served, model, prompt, 24)
        asked = served.gauge("attention_answered_total")
        assert asked["attention-0"] > 0 and asked["attention-1"] > 0
        with ThreadPoolExecutor(8) as pool:
            for each in [pool.submit(ask, served, model, prompt, 24) for prompt in prompts]:
                each.result()


@pytest.mark.parametrize("batches", [2, 3])
def test_batches_take_turns(batches: int, model: Path) -> None:
    """Of several answers together, most with KV at both attention nodes."""
    attention = {"count": 2, "kv_memory": 60 * BLOCK_BYTES}
    prompts = [prompt_of(at, length) for at, length in enumerate((20, 300, 60, 100, 250, 33))]
    config = deployment(model, {"prefill": 0, "decode": 0, "mixed": 1, "attention": attention})
    config["engine"] |= {"batches": batches, "max_sequences": 6, "kv_memory": 40 * BLOCK_BYTES}
    took = mock.patch.object(Turns, "_take", autospec=True, side_effect=Turns._take)
    with took as take, inside(config) as served, ThreadPoolExecutor(6) as pool:
        with served.held():
            asked = [pool.submit(ask, served, model, prompt, 24) for prompt in prompts]
            served.wait_until_asked(len(prompts))
        for each in asked:
            each.result()
    assert max(len(call.args[1]) for call in take.call_args_list) == batches


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "kimi_linear"])
def test_hybrid_and_latent_models(family: str, tmp_path: Path) -> None:
    """Only layers that keep KV ask; states stay at home and travel with the hand-over."""
    save_tiny(family, tmp_path)
    layout = layout_of(tmp_path)
    memory = 14 * layout.block_bytes + 4 * layout.state_bytes + 6 * layout.state_blocks * layout.block_bytes
    roles = {"prefill": 1, "decode": 1, "attention": {"count": 1, "kv_memory": 40 * layout.block_bytes}}
    config = deployment(tmp_path, roles)
    config["engine"] |= {"kv_memory": memory}
    with inside(config) as served:
        for at, length in enumerate((20, 150, 330)):
            ask(served, tmp_path, prompt_of(at, length), 20)
        served.wait_until(lambda: served.total("attention_answered_total") > 0, "answers")


CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 1e-4, "decode_fixed_s": 0.004}


@pytest.mark.parametrize("victim", ["attention-0", "mixed-0"])
def test_a_death_costs_an_attempt_and_no_token(victim: str, tmp_path: Path) -> None:
    """kill -9 while answers go on: KV that was with a dead attention node is computed anew from prompt and answer."""
    flight = tmp_path / "flight.jsonl"
    roles = {"prefill": 0, "decode": 0, "mixed": 2, "attention": 2}
    sections = {"roles": roles, "engine": {"kind": "emulated", "cost": CURVE, "token_budget": 256}}
    recipe = recipe_of(bytes_folder(), bytes_folder(), 16)
    prompts = [[at % 200 for at in range(seed, seed + 40 + 80 * seed)] for seed in range(8)]
    with serve(tmp_path, sections, "--record", str(flight)) as served, ThreadPoolExecutor(8) as pool:
        begun = [threading.Event() for _ in prompts]
        asked = [pool.submit(streamed, served, *each) for each in zip(prompts, [150] * 8, begun, strict=True)]
        for event in begun:
            assert event.wait(LIMIT_S)
        kill(served, victim, flight, 1)
        answers = [each.result() for each in asked]
        assert served.total("attention_answered_total") > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == expected_tokens(recipe, prompt, 150, stop_tokens=(257,))
