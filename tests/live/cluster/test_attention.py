"""Nodes of role attention: they have the KV of prompts and answers, shared by heads, and the others little memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.node import events
from isthmus.core.node.letters import Found
from isthmus.core.scheduler import Run
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.interface import Chunk
from tests.inside import Inside, inside
from tests.live.cluster.test_exact_pool import SLOW, prompt_of
from tests.models import check_greedy, make_model
from tests.served import streamed

HOME_BLOCKS = 14
PROMPTS = [prompt_of(at, length) for at, length in enumerate((1, 16, 17, 400, 60, 33, 280))]
"""Some have no full block, some are longer than the memory of a home."""
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of KV heads; there are four query heads."""
    found = {}
    for kv_heads in (1, 2, 4):
        found[kv_heads] = tmp_path_factory.mktemp("attention") / "model"
        make_model(found[kv_heads], "llama", num_key_value_heads=kv_heads)
    return found


def block_bytes(kv_heads: int) -> int:
    """3 layers of 16 tokens with heads of 16 numbers in float32, K and V."""
    return 16 * 3 * 2 * kv_heads * 16 * 4


def deployment(
    model: Path, kv_heads: int, attention: int, roles: dict[str, int], **fields: Any
) -> dict[str, Any]:
    size = block_bytes(kv_heads)
    each = {"count": attention, "kv_memory": 120 * size}
    return {
        "model": str(model),
        "roles": {"prefill": 0, "decode": 0} | roles | {"attention": each},
        "engine": {"cost": SLOW, "token_budget": 64, "kv_memory": HOME_BLOCKS * size, "max_sequences": 4},
        "cache": {"dram": 0},
    } | fields  # fmt: skip


def ask_all(served: Inside, model: Path, prompts: list[list[int]], num_tokens: int) -> None:
    """One after the other, and all at once."""

    def ask(prompt: list[int]) -> None:
        answer = served.tokens(prompt, num_tokens, ignore_eos=True)
        assert len(answer) == num_tokens
        check_greedy(model, prompt, answer)

    for prompt in prompts:
        ask(prompt)
    with ThreadPoolExecutor(len(prompts)) as pool:
        for each in [pool.submit(ask, prompt) for prompt in prompts]:
            each.result()


ONE, PAIRS = {"mixed": 1}, {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("kv_heads", "attention", "roles"),
    [(2, 1, ONE), (2, 2, ONE), (2, 4, ONE), (4, 1, ONE), (4, 2, ONE), (4, 4, ONE), (1, 2, ONE), (2, 2, PAIRS)],
)
def test_tokens_are_those_of_one_node(
    kv_heads: int, attention: int, roles: dict[str, int], models: dict[int, Path]
) -> None:
    """However many share the heads; where these cannot be cut, by tokens."""
    with inside(deployment(models[kv_heads], kv_heads, attention, roles)) as served:
        ask_all(served, models[kv_heads], PROMPTS, NUM_TOKENS)
        answered = served.gauge("attention_answered_total")
        sharing = min(kv_heads, attention)
        used = sum(answered[f"attention-{at}"] > 0 for at in range(attention))
        assert used >= sharing


def process_of(served: Inside, name: str) -> NodeProcess:
    [found] = [each for each in served.processes if each._facts.node == name]
    assert isinstance(found, NodeProcess)
    return found


class Counted:
    """Tokens that a node computes while KV of their request is elsewhere."""

    def __init__(self, process: NodeProcess) -> None:
        self.tokens, engine = 0, process.runs.engine
        build, step = engine.build, engine.step
        counts: dict[int, int] = {}

        def counted_build(chunks: Sequence[Chunk]) -> Any:
            batch = build(chunks)
            counts[id(batch)] = sum(len(chunk.tokens) for chunk in chunks if chunk.holdings)
            return batch

        def counted_step(batch: Any, *rest: Any) -> Any:
            self.tokens += counts[id(batch)]
            return step(batch, *rest)

        engine.build, engine.step = counted_build, counted_step  # type: ignore[method-assign]


@pytest.mark.parametrize(("kv_heads", "attention"), [(2, 2), (4, 4), (4, 2), (4, 1)])
def test_bytes_of_a_token_are_those_of_lamina(kv_heads: int, attention: int, models: dict[int, Path]) -> None:
    """Of each token and layer its queries there, sums and a logarithm for each head back, however long the context and
    however many share the heads; and once its K and V. Lamina says (2 + 2 / G) e d, without the logarithm."""
    layers, heads, dim, e = 3, 4, 16, 4
    with inside(deployment(models[kv_heads], kv_heads, attention, ONE)) as served:
        home = process_of(served, "mixed-0")
        holders, sent, counted = home.mover.holders, home.mover.shipments, Counted(home)
        for prompt in (PROMPTS[2], PROMPTS[3]):
            before = counted.tokens, holders.bytes_asked, holders.bytes_answered, sent.bytes_out
            served.tokens(prompt, 64 - (len(prompt) - 1) % 16, ignore_eos=True)
            after = counted.tokens, holders.bytes_asked, holders.bytes_answered, sent.bytes_out
            tokens, asked, answered, shipped = (then - now for then, now in zip(after, before, strict=True))
            assert asked == layers * 4 * heads * dim * tokens
            assert answered == layers * 4 * heads * (dim + 1) * tokens
            blocks, rest = divmod(shipped, block_bytes(kv_heads))
            full = (len(prompt) + 63 - (len(prompt) - 1) % 16 - 1) // 16
            assert rest == 0 and full - 2 <= blocks <= full, "each block once, but those that filled last"
            kv = shipped / (16 * blocks)
            found, group = (asked + answered) / tokens + kv, heads // kv_heads
            assert found == layers * ((2 + 2 / group) * e * heads * dim + 4 * heads)


class Watched:
    """What a node is told and answers, of what this test asks."""

    def __init__(self, process: NodeProcess) -> None:
        self.found: dict[str, list[int]] = {}
        self.shipped: dict[str, list[tuple[int, int]]] = {}
        self.begun: dict[str, int] = {}
        on = process.node.on

        def watched(event: events.Event, now: int) -> list[events.Action]:
            match event:
                case events.Heard(_, Found(key, num_blocks)):
                    self.found.setdefault(key, []).append(num_blocks)
            actions = on(event, now)
            for action in actions:
                if isinstance(action, events.Ship):
                    ships = self.shipped.setdefault(action.key, [])
                    ships.append((action.first, len(action.blocks)))
                if isinstance(action, Run):
                    for piece in action.chunks:
                        self.begun.setdefault(piece.request, piece.start)
            return actions

        process.node.on = watched  # type: ignore[method-assign]


def killed_in_their_midst(
    served: Inside,
    pool: ThreadPoolExecutor,
    victim: str | Callable[[], str],
    prompts: list[list[int]],
    num_tokens: int,
) -> list[Future[list[int]]]:
    """Answers that have all begun, if the engine gets that far before one is over, when a node dies; none is over."""
    begun = [threading.Event() for _ in prompts]
    with served.held() as steps:
        asked = [
            pool.submit(streamed, served, prompt, num_tokens, event, ignore_eos=True)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        served.wait_until_asked(len(prompts))
        steps.let(num_tokens - 10)
        served.wait_until(lambda: steps.is_spent() or all(each.is_set() for each in begun), "all begin")
        served.kill(victim if isinstance(victim, str) else victim())
    return asked


@pytest.mark.parametrize(
    ("kv_heads", "attention", "roles"), [(2, 2, {"mixed": 2}), (1, 2, {"mixed": 2}), (2, 2, PAIRS)]
)
def test_a_home_that_dies_is_replaced_and_no_kv_moves(
    kv_heads: int, attention: int, roles: dict[str, int], models: dict[int, Path]
) -> None:
    """In mid-decode under load: who goes on computes what lay at the home that died, and ships what is new."""
    model, num_tokens = models[kv_heads], 160
    victim, heirs = ("mixed-0", ["mixed-1"]) if "mixed" in roles else ("decode-0", ["prefill-0", "prefill-1"])
    prompts = [prompt_of(at, length) for at, length in enumerate((400, 60, 280, 150))]
    config = deployment(model, kv_heads, attention, roles, policy="round_robin")
    with inside(config) as served, ThreadPoolExecutor(4) as pool:
        watched = [Watched(process_of(served, heir)) for heir in heirs]
        asked = killed_in_their_midst(served, pool, victim, prompts, num_tokens)
        for prompt, each in zip(prompts, asked, strict=True):
            answer = each.result()
            assert len(answer) == num_tokens
            check_greedy(model, prompt, answer)
        again = [(seen, key) for seen in watched for key in seen.found]
        assert any(max(seen.found[key]) > 0 for seen, key in again), "the node that died had none"
        for seen, key in again:
            whole = sum(seen.found[key]) if kv_heads == 1 else min(seen.found[key])
            assert key.endswith("#2")
            assert seen.begun[key] == 16 * whole, "what was kept is not computed"
            if kv_heads > 1:
                assert all(first >= whole for first, _ in seen.shipped.get(key, ())), (
                    "what was kept is not shipped"
                )


def test_a_holder_that_dies_costs_no_token(models: dict[int, Path]) -> None:
    """What it had is computed anew from prompt and answer, with those that are left."""
    model, prompts = models[4], [prompt_of(at, length) for at, length in enumerate((400, 60, 280, 150))]
    with inside(deployment(model, 4, 4, {"mixed": 2})) as served, ThreadPoolExecutor(4) as pool:
        asked = killed_in_their_midst(served, pool, "attention-2", prompts, 120)
        for prompt, each in zip(prompts, asked, strict=True):
            answer = each.result()
            assert len(answer) == 120
            check_greedy(model, prompt, answer)


def test_a_home_whose_kv_lies_with_other_homes_is_replaced(models: dict[int, Path]) -> None:
    """By tokens, with mixed nodes that had memory; the one that goes on had none of it."""
    model, prompt = models[2], prompt_of(1, 540)
    config = deployment(model, 2, 0, {"mixed": 4}, policy="round_robin")
    with inside(config) as served, ThreadPoolExecutor(1) as pool:
        watched = {}
        for at in range(4):
            watched[f"mixed-{at}"] = Watched(process_of(served, f"mixed-{at}"))

        def victim() -> str:
            [name] = [name for name, seen in watched.items() if seen.begun]
            return name

        [asked] = killed_in_their_midst(served, pool, victim, [prompt], 60)
        answer = asked.result()
        assert len(answer) == 60
        check_greedy(model, prompt, answer)
        [seen] = [seen for seen in watched.values() if seen.found]
        [key] = seen.found
        assert seen.begun[key] == 16 * sum(seen.found[key]) > 0
