"""KV goes to other nodes and comes home while its request decodes: through the API, with the right tokens."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.cli.models import bytes_folder
from isthmus.core.node.events import Move, Return
from isthmus.lab.papers.infinite_llm.lending import GREEDY, LEDGER
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.inside import Inside, inside
from tests.live.cluster.test_exact_hybrid import layout_of
from tests.live.cluster.test_exact_pool import prompt_of
from tests.live.engine.hybrids import save_tiny
from tests.live.kv.test_holders import BLOCK_BYTES, CURVE, ask, deployment
from tests.models import make_model
from tests.served import LIMIT_S

PACE_S = 0.02
"""Of an iteration, until something was lent: a shortage lasts as long on a quick machine."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moves") / "model"
    make_model(folder, "llama")
    return folder


@contextmanager
def moving(served: Inside, seed: int) -> Iterator[None]:
    """Meanwhile blocks of whatever decodes are told to go to any node, and to come back: an order an iteration."""
    draw = random.Random(seed)
    nodes = [process for process in served.processes if isinstance(process, NodeProcess)]

    def order() -> None:
        home = draw.choice(nodes)
        with home.worker.lock:
            attempts = list(home.node._attempts.values())
        if not attempts:
            return
        attempt, holdings = draw.choice(attempts), ()
        holdings = attempt.remote.planned
        if holdings and draw.random() < 0.6:
            home.tell(Return(attempt.request, holdings[-1].holders[0], draw.randrange(1, 4)))
        else:
            holder = draw.choice([other for other in nodes if other is not home]).node.node
            home.tell(Move(attempt.request, holder, draw.randrange(1, 5)))

    with served.stepping(lambda _: served.call(order)):
        yield


def both_ways(served: Inside) -> None:
    """Something went, and something came home."""
    for metric in ("kv_bytes_shipped_total", "kv_bytes_returned_total", "attention_answered_total"):
        served.wait_until(lambda metric=metric: served.total(metric) > 0, metric)
    assert served.total("seal_mismatches_total") == 0


@pytest.mark.parametrize("roles", [{"mixed": 3}, {"prefill": 1, "decode": 2}], ids=["mixed", "1P2D"])
def test_blocks_go_and_come_at_any_step_and_change_no_token(roles: dict[str, int], model: Path) -> None:
    settings = deployment(model, {"prefill": 0, "decode": 0, "mixed": 0} | roles)
    settings["engine"] |= {"kv_memory": 40 * BLOCK_BYTES}
    prompts = [prompt_of(at, length) for at, length in enumerate((20, 100, 60, 150, 33, 90))]
    with inside(settings) as served, moving(served, 1), ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(ask, served, model, prompt, 120) for prompt in prompts]:
            each.result()
        both_ways(served)


def test_of_a_hybrid_model(tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    layout = layout_of(tmp_path)
    memory = 30 * layout.block_bytes + 4 * layout.state_bytes + 6 * layout.state_blocks * layout.block_bytes
    settings = deployment(tmp_path, {"prefill": 0, "decode": 0, "mixed": 2})
    settings["engine"] |= {"kv_memory": memory}
    with inside(settings) as served, moving(served, 2), ThreadPoolExecutor(3) as pool:
        prompts = [prompt_of(at, length) for at, length in enumerate((20, 100, 60))]
        for each in [pool.submit(ask, served, tmp_path, prompt, 80) for prompt in prompts]:
            each.result()
        both_ways(served)


def test_of_the_emulated_engine() -> None:
    curve = CURVE | {"decode_fixed_s": 0.002}
    settings = {
        "roles": {"prefill": 0, "decode": 0, "mixed": 3},
        "engine": {"kind": "emulated", "cost": curve, "token_budget": 256},
    }
    recipe = recipe_of(bytes_folder(), bytes_folder(), 16)
    prompts = [[at % 200 for at in range(seed, seed + 40 + 80 * seed)] for seed in range(6)]

    def answered(prompt: list[int]) -> None:
        answer = served.tokens(prompt, 150, ignore_eos=True)
        assert answer == expected_tokens(recipe, prompt, 150)

    with inside(settings) as served, moving(served, 3), ThreadPoolExecutor(6) as pool:
        for each in [pool.submit(answered, prompt) for prompt in prompts]:
            each.result()
        both_ways(served)


@pytest.mark.parametrize("policy", [LEDGER, GREEDY, "isthmus"])
def test_a_node_that_lacks_memory_borrows_and_pays_back(policy: str, model: Path) -> None:
    """One long answer leaves little room for the short requests that come to the same node."""
    lending = {"policy": policy, "period_s": 0.02, "reserve": 0.1}
    settings = deployment(model, {"prefill": 0, "decode": 0, "mixed": 2}, policy="round_robin", lending=lending)
    settings["engine"] |= {"kv_memory": 24 * BLOCK_BYTES}
    lengths = [(250, 110), *[(30, 8), (80, 24)] * 8]
    begins = threading.Event()

    def wait(_: NodeProcess) -> None:
        assert begins.wait(LIMIT_S)
        if not any(process.mover.gauges()["kv_bytes_shipped_total"] for process in served.processes):
            time.sleep(PACE_S)

    with inside(settings) as served, ThreadPoolExecutor(len(lengths)) as pool, served.stepping(wait):
        asked = []
        for at, (length, count) in enumerate(lengths):  # in this order, by which each has its node
            asked.append(pool.submit(ask, served, model, prompt_of(at, length), count))
            served.wait_until(lambda at=at: len(served.head._streams) > at, "it is there")
        begins.set()
        for each in asked:
            each.result()
        served.wait_until(lambda: served.total("kv_bytes_shipped_total") > 0, "something was lent")
