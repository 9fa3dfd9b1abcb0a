"""KV on several nodes together with everything else a request may meet, through the API; tokens are those of
transformers, and nothing is left on any node.

Nodes of role attention have the KV of prompts and answers, shared by heads, and the others little memory; without them,
what has no room at home goes to other nodes that compute, by tokens.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from isthmus.core.node import away, events
from isthmus.core.node.events import Lend, Repay
from isthmus.core.node.letters import ClaimReply
from isthmus.core.scheduler import Run
from isthmus.core.types import NS_PER_S
from isthmus.lab.papers.infinite_llm.lending import LEDGER
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.emulated import expected_tokens
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.turns import BatchTurns
from tests.inside import Inside, inside
from tests.live.cluster.kit import RECIPE, STEADY
from tests.live.cluster.test_exact_hybrid import layout_of
from tests.live.cluster.test_exact_pool import SLOW, prompt_of
from tests.live.cluster.test_structured import asked as in_form
from tests.live.cluster.test_structured import check as check_form
from tests.live.engine.hybrids import save_tiny
from tests.models import EOS, check_greedy, make_model, reference_logits
from tests.served import LIMIT_S, Client, streamed

NODE_BLOCKS = 12
NODE_TOKENS = 16 * NODE_BLOCKS
ONE, PAIRS = {"mixed": 1}, {"prefill": 2, "decode": 2}
LENGTHS = (1, 16, 17, 400, 60, 33, 280)
"""Of prompts: some have no full block, some are longer than the memory of a home."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of KV heads; there are four query heads."""
    made = {}
    for kv_heads in (1, 2, 4):
        made[kv_heads] = tmp_path_factory.mktemp("elsewhere") / "model"
        make_model(made[kv_heads], "llama", num_key_value_heads=kv_heads)
        (made[kv_heads] / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return made


@pytest.fixture(scope="module")
def model(models: dict[int, Path]) -> Path:
    return models[2]


def block_bytes(kv_heads: int = 2) -> int:
    """3 layers of 16 tokens with heads of 16 numbers in float32, K and V."""
    return 16 * 3 * 2 * kv_heads * 16 * 4


def deployment(
    model: Path,
    roles: dict[str, Any],
    *,
    heads: int = 2,
    blocks: int = NODE_BLOCKS,
    attention: int = 0,
    engine: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """So many blocks of memory for each node that computes; nodes of role attention have enough for every prompt."""
    each = {"attention": {"count": attention, "kv_memory": 120 * block_bytes(heads)}} if attention else {}
    size = blocks * block_bytes(heads)
    return {
        "model": str(model),
        "roles": {"prefill": 0, "decode": 0} | roles | each,
        "engine": {"cost": SLOW, "token_budget": 64, "kv_memory": size, "max_sequences": 4} | (engine or {}),
        "cache": {"dram": 0} | (cache or {}),
    } | sections  # fmt: skip


def prompts_of(*lengths: int) -> list[list[int]]:
    return [prompt_of(at, length) for at, length in enumerate(lengths)]


def ask(served: Client, model: Path, prompt: list[int], num_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    found = served.complete(prompt, num_tokens, ignore_eos=True, **fields)
    answer = found["choices"][0]["token_ids"]
    assert len(answer) == num_tokens
    check_greedy(model, prompt, answer)
    return found


def ask_all(served: Inside, model: Path, prompts: list[list[int]], num_tokens: int = 20) -> None:
    """At once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        with served.held():
            asked = pool.map(lambda prompt: ask(served, model, prompt, num_tokens), prompts)
            served.wait_until_asked(len(prompts))
        list(asked)


def attended(served: Client) -> dict[str, float]:
    """How often each node was asked, that was."""
    return {node: count for node, count in served.gauge("attention_answered_total").items() if count}


def process_of(served: Inside, name: str) -> NodeProcess:
    [found] = [each for each in served.processes if each._facts.node == name]
    assert isinstance(found, NodeProcess)
    return found


# Where it is.


@pytest.mark.parametrize(
    ("heads", "attention", "roles"),
    [(2, 4, ONE), (4, 2, ONE), (1, 2, ONE), (2, 2, PAIRS)],
)
def test_tokens_are_those_of_one_node(
    heads: int, attention: int, roles: dict[str, int], models: dict[int, Path]
) -> None:
    """However many share the heads; where these cannot be cut, by tokens. One after the other, and all at once."""
    model, prompts = models[heads], prompts_of(*LENGTHS)
    with inside(deployment(model, roles, heads=heads, blocks=14, attention=attention)) as served:
        for prompt in prompts:
            ask(served, model, prompt, 40)
        ask_all(served, model, prompts, 40)
        assert sum(node.startswith("attention") for node in attended(served)) >= min(heads, attention)


@pytest.mark.parametrize(
    ("roles", "heads", "holders"),
    [({"mixed": 4}, 4, 3), (PAIRS, 2, 1)],
    ids=["3 MHA", "2P2D"],
)
def test_the_longest_context_is_that_of_all_nodes_together(
    roles: dict[str, int], heads: int, holders: int, models: dict[int, Path]
) -> None:
    """As much as must goes to those that have room, so the last has less; of a short prompt nobody has anything. And
    long and short requests together."""
    total, model = int((holders + (1.6 if roles is PAIRS else 0.5)) * NODE_TOKENS), models[heads]
    with inside(deployment(model, roles, heads=heads)) as served:
        ask(served, model, prompt_of(1, 30))
        assert attended(served) == {}
        ask(served, model, prompt_of(2, total - 20))
        served.wait_until(lambda: len(attended(served)) >= holders, f"questions to {holders}")
        ask(served, model, prompt_of(3, total - 3), 3)
        ask_all(served, model, prompts_of(20, total - 150, 60, 100, total - 200, 33), 24)
        served.wait_until(lambda: not any(served.gauge("kv_blocks_hosted").values()), "room comes back")


def test_a_hybrid_model_with_latent_vectors(tmp_path: Path) -> None:
    """Only layers that keep KV ask; states stay at home and travel with the hand-over."""
    save_tiny("kimi_linear", tmp_path)
    layout = layout_of(tmp_path)
    memory = 14 * layout.block_bytes + 4 * layout.state_bytes + 6 * layout.state_blocks * layout.block_bytes
    roles = {"prefill": 1, "decode": 1, "attention": {"count": 1, "kv_memory": 40 * layout.block_bytes}}
    with inside(deployment(tmp_path, roles, engine={"kv_memory": memory})) as served:
        for prompt in prompts_of(20, 150, 330):
            ask(served, tmp_path, prompt)
        served.wait_until(lambda: attended(served), "answers")


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


@pytest.mark.parametrize(("kv_heads", "attention"), [(2, 2), (4, 1)])
def test_bytes_of_a_token_are_those_of_lamina(kv_heads: int, attention: int, models: dict[int, Path]) -> None:
    """Of each token and layer its queries there, sums and a logarithm for each head back, however long the context and
    however many share the heads; and once its K and V. Lamina says (2 + 2 / G) e d, without the logarithm."""
    layers, heads, dim, e = 3, 4, 16, 4
    config = deployment(models[kv_heads], ONE, heads=kv_heads, blocks=14, attention=attention)
    with inside(config) as served:
        home = process_of(served, "mixed-0")
        holders, sent, counted = home.mover.holders, home.mover.shipments, Counted(home)
        for prompt in prompts_of(17, 400):
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


# Together with everything else.


def test_batches_take_turns(model: Path) -> None:
    """Of several answers together, most with KV at both attention nodes."""
    engine = {"batches": 3, "max_sequences": 6, "kv_memory": 40 * block_bytes()}
    took = mock.patch.object(BatchTurns, "_take", autospec=True, side_effect=BatchTurns._take)
    with took as take, inside(deployment(model, ONE, attention=2, engine=engine)) as served:
        ask_all(served, model, prompts_of(20, 300, 60, 100, 250, 33), 24)
    assert max(len(call.args[1]) for call in take.call_args_list) == 3


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_a_prefix_is_used_again(tier: str, model: Path, tmp_path: Path) -> None:
    """What is cached is loaded at home and shipped as if it were computed."""
    cache: dict[str, Any] = {"dram": 40 * block_bytes()}
    if tier == "ssd":
        cache = {"dram": 8 * block_bytes(), "ssd": 200 * block_bytes(), "folder": str(tmp_path)}
    prompt = prompt_of(5, 400)
    with inside(deployment(model, ONE, attention=2, cache=cache)) as served:
        cached = []
        for at in range(3):
            found = ask(served, model, [*prompt, *prompt_of(at, 30)])
            cached.append(found["usage"]["prompt_tokens_details"]["cached_tokens"])
            served.wait_until(lambda: served.total("node_requests_running") == 0, "idle")
        assert cached[0] == 0 or served.total("num_preemptions_total"), "nothing was cached before"
        assert min(cached[1:]) > 0, cached
        ask_all(served, model, [[*prompt, *prompt_of(at, 40)] for at in range(3, 7)])


def test_who_is_pre_empted_begins_anew(model: Path) -> None:
    """Answers that grow beyond the memory that there is, at home and elsewhere."""
    roles = ONE | {"attention": {"count": 2, "kv_memory": 12 * block_bytes()}}
    with inside(deployment(model, roles)) as served:
        ask_all(served, model, prompts_of(*[30] * 6), 150)
        served.wait_until(
            lambda: attended(served) and served.total("num_preemptions_total") > 0, "pre-emptions"
        )


def test_two_clusters(model: Path) -> None:
    """Computed in one, held and answered in the other; but what is longer than the memory of a node, all in one."""
    memory = {"kv_memory": NODE_BLOCKS * block_bytes()}
    east = {"prefill": memory, "decode": memory, "attention": {"count": 2, "kv_memory": 60 * block_bytes()}}
    settings = deployment(model, {}) | {
        "clusters": {
            "east": {"roles": {name: {"count": 1} | each for name, each in east.items()}},
            "west": {"roles": {"prefill": {"count": 1, "kv_memory": 60 * block_bytes()}}},
        },
        "links": [{"between": ["west", "east"], "gbps": 10, "rtt_ms": 1}],
        "offload": {"threshold": 100, "control": "none", "period_s": 0.1},
    }
    del settings["roles"]
    with inside(settings) as served:
        for length in (40, 300, 150):
            ask(served, model, prompt_of(length, length))
        ask_all(served, model, prompts_of(60, 250, 130, 30))
        assert set(attended(served)) == {"east-attention-0", "east-attention-1"}
        assert served.gauge("tokens_computed_total")["west-prefill-0"] >= 150
        assert served.gauge("kv_bytes_shipped_total")["west-prefill-0"] >= 9 * block_bytes()


def test_who_is_cancelled_leaves_nothing(model: Path) -> None:
    """While the prompt is computed, and in the midst of the answer."""
    with inside(deployment(model, {"prefill": 1, "decode": 1}, attention=2)) as served:
        for seed, after in enumerate((0, 1, 3)):
            body = {
                "model": served.model, "prompt": prompt_of(seed, 500), "max_tokens": 100, "stream": True,
                "temperature": 0,
            }  # fmt: skip
            with served.http.stream("POST", "/v1/completions", json=body) as reply:
                lines = (line for line in reply.iter_lines() if line)
                assert len(list(itertools.islice(lines, after))) == after
            served.wait_until(
                lambda: served.total("kv_blocks_available") == served.total("kv_blocks"), "blocks come back"
            )
        ask(served, model, prompt_of(9, 500))


def test_answers_in_a_form_and_probabilities_are_those_of_one_memory(model: Path) -> None:
    """Of the answer and of the prompt."""
    schema = {"enum": ["where it was computed", "with one of those who attend to it", "nowhere"]}
    prompt = prompt_of(4, 300)
    with inside(deployment(model, ONE, attention=2)) as served:
        for seed in range(3):
            body = in_form(schema, seed=seed, temperature=seed % 2)
            check_form(served.tokens(prompt_of(seed, 300), 120, **body), schema, EOS)
        [there] = ask(served, model, prompt, 6, logprobs=2, prompt_logprobs=1)["choices"]
        assert attended(served)
    logits = reference_logits(model, [*prompt, *there["token_ids"][:-1]]).log_softmax(-1)
    answer = logits[len(prompt) - 1 :]
    for found, position, token in zip(
        there["logprobs"]["token_logprobs"], answer, there["token_ids"], strict=True
    ):
        assert found == pytest.approx(position[token].item(), abs=1e-3)
    scores = there["prompt_logprobs"]
    assert len(scores) == len(prompt) and scores[0] is None
    for found, position, token in zip(scores[1:], logits, prompt[1:], strict=False):
        assert found[str(token)]["logprob"] == pytest.approx(position[token].item(), abs=1e-3)


def test_what_no_nodes_have_memory_for_is_refused_in_a_line(model: Path) -> None:
    with inside(deployment(model, {"mixed": 2})) as served:
        longest = served.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert NODE_TOKENS < longest < 2 * NODE_TOKENS
        ask(served, model, prompt_of(1, longest - 4), 4)
        body = {"model": served.model, "prompt": prompt_of(1, longest), "max_tokens": 4}
        reply = served.http.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert f"maximum context length is {longest} tokens" in reply.json()["error"]["message"]
        reply = served.http.post("/v1/completions", json=body | {"prompt": prompt_of(1, 60), "max_tokens": 200})
        assert reply.status_code == 400
        assert "no node has KV memory for an answer of 200 tokens" in reply.json()["error"]["message"]


# It goes and comes home while its request decodes.


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
        attempt = draw.choice(attempts)
        route = attempt.begin.route
        holdings = attempt.remote.planned
        if holdings and draw.random() < 0.6:
            kind, holder, limit = Repay, holdings[-1].holders[0], 4
        else:
            kind, holder, limit = (
                Lend,
                draw.choice([other for other in nodes if other is not home]).node.node,
                5,
            )
        count = draw.randrange(1, limit)
        home.tell(kind(route.request, route.attempt, home.node.node, holder, count))

    with served.stepping(lambda _: served.call(order)):
        yield


@pytest.mark.parametrize("which", ["1P2D", "hybrid", "emulated"])
def test_blocks_go_and_come_at_any_step_and_change_no_token(which: str, model: Path, tmp_path: Path) -> None:
    lengths, num_tokens = (20, 100, 60, 150, 33, 90), 120
    roles = {"prefill": 1, "decode": 2} if which == "1P2D" else {"mixed": 2 if which == "hybrid" else 3}
    settings = deployment(model, roles, blocks=40)
    if which == "hybrid":
        model, lengths, num_tokens = save_tiny("qwen3_next", tmp_path), lengths[:3], 80
        layout = layout_of(model)
        memory = 30 * layout.block_bytes + 4 * layout.state_bytes + 6 * layout.state_blocks * layout.block_bytes
        settings = deployment(model, roles, engine={"kv_memory": memory})
    elif which == "emulated":
        engine = {"kind": "emulated", "cost": STEADY | {"decode_fixed_s": 0.002}, "token_budget": 256}
        settings = {"roles": settings["roles"], "engine": engine}

    def answered(prompt: list[int]) -> None:
        if which != "emulated":
            ask(served, model, prompt, num_tokens)
            return
        assert served.tokens(prompt, num_tokens, ignore_eos=True) == expected_tokens(RECIPE, prompt, num_tokens)

    with inside(settings) as served, moving(served, 1), ThreadPoolExecutor(len(lengths)) as pool:
        list(pool.map(answered, prompts_of(*lengths)))
        for metric in ("kv_bytes_shipped_total", "kv_bytes_returned_total", "attention_answered_total"):
            served.wait_until(lambda metric=metric: served.total(metric) > 0, metric)
        assert served.total("seal_mismatches_total") == 0


PACE_S = 0.02
"""Of an iteration, until something was lent: a shortage lasts as long on a quick machine."""


@pytest.mark.parametrize("policy", [LEDGER, "isthmus"])
def test_a_node_that_lacks_memory_borrows_and_pays_back(policy: str, model: Path) -> None:
    """One long answer leaves little room for the short requests that come to the same node."""
    lending = {"policy": policy, "period_s": 0.02, "reserve": 0.1}
    settings = deployment(model, {"mixed": 2}, blocks=24, policy="round_robin", lending=lending)
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


# Faults.


class Watched:
    """What a node is told and answers, of what this test asks."""

    def __init__(self, process: NodeProcess) -> None:
        self.found: dict[str, list[int]] = {}
        self.shipped: dict[str, list[tuple[int, int]]] = {}
        self.begun: dict[str, int] = {}
        on = process.node.on

        def watched(event: events.Event, now: int) -> list[events.Action]:
            match event:
                case events.LetterReceived(_, ClaimReply(key, num_blocks)):
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


def in_their_midst(
    served: Inside,
    model: Path,
    pool: ThreadPoolExecutor,
    prompts: list[list[int]],
    num_tokens: int,
    harm: Callable[[], object],
) -> None:
    """Harm comes to answers that have all begun, if the engine gets that far before one is over; none is over. Each is
    whole and exact."""
    begun = [threading.Event() for _ in prompts]
    with served.held() as steps:
        asked: list[Future[list[int]]] = [
            pool.submit(streamed, served, prompt, num_tokens, event, ignore_eos=True)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        served.wait_until_asked(len(prompts))
        steps.let(num_tokens - 10)
        served.wait_until(lambda: steps.is_spent() or all(each.is_set() for each in begun), "all begin")
        harm()
    for prompt, each in zip(prompts, asked, strict=True):
        answer = each.result()
        assert len(answer) == num_tokens
        check_greedy(model, prompt, answer)


@pytest.mark.parametrize(
    ("heads", "roles"), [(2, {"mixed": 2}), (1, {"mixed": 2}), (2, PAIRS)], ids=["mixed", "by tokens", "2P2D"]
)
def test_a_home_that_dies_is_replaced_and_no_kv_moves(
    heads: int, roles: dict[str, int], models: dict[int, Path]
) -> None:
    """In mid-decode under load: who goes on computes what lay at the home that died, and ships what is new."""
    model, prompts = models[heads], prompts_of(400, 60, 280, 150)
    victim, heirs = ("mixed-0", ["mixed-1"]) if "mixed" in roles else ("decode-0", ["prefill-0", "prefill-1"])
    config = deployment(model, roles, heads=heads, blocks=14, attention=2, policy="round_robin")
    with inside(config) as served, ThreadPoolExecutor(4) as pool:
        watched = [Watched(process_of(served, heir)) for heir in heirs]
        in_their_midst(served, model, pool, prompts, 160, lambda: served.kill(victim))
        again = [(seen, key) for seen in watched for key in seen.found]
        assert any(max(seen.found[key]) > 0 for seen, key in again), "the node that died had none"
        for seen, key in again:
            whole = sum(seen.found[key]) if heads == 1 else min(seen.found[key])
            assert key.endswith("#2")
            assert seen.begun[key] == 16 * whole, "what was kept is not computed"
            if heads > 1:
                assert all(first >= whole for first, _ in seen.shipped.get(key, ())), (
                    "what was kept is not shipped"
                )


def test_a_home_whose_kv_lies_with_other_homes_is_replaced(model: Path) -> None:
    """By tokens, with mixed nodes that had memory; the one that goes on had none of it."""
    config = deployment(model, {"mixed": 4}, blocks=14, policy="round_robin")
    with inside(config) as served, ThreadPoolExecutor(1) as pool:
        watched = {f"mixed-{at}": Watched(process_of(served, f"mixed-{at}")) for at in range(4)}

        def harm() -> None:
            [name] = [name for name, seen in watched.items() if seen.begun]
            served.kill(name)

        in_their_midst(served, model, pool, [prompt_of(1, 540)], 60, harm)
        [seen] = [seen for seen in watched.values() if seen.found]
        [key] = seen.found
        assert seen.begun[key] == 16 * sum(seen.found[key]) > 0


@pytest.mark.parametrize("cut", ["line", "session", "holder"])
def test_a_holder_that_is_lost_costs_an_attempt_and_no_token(
    cut: str, models: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had is computed anew from prompt and answer, with those that are left."""
    monkeypatch.setattr(away, "LEASE_NS", NS_PER_S // 2)  # who was cut off claims nothing: idle is waited for
    config = deployment(models[4], {"mixed": 2 if cut == "holder" else 1}, heads=4, blocks=14, attention=4)
    with inside(config) as served, ThreadPoolExecutor(4) as pool:

        def harm() -> None:
            home = process_of(served, "mixed-0")
            lines = dict(home.mover.holders._lines)
            assert lines
            for holder, line in lines.items():
                if cut == "line":
                    line.result().asker.hang_up()
                elif (session := home.peers.open_to(holder)) is not None:
                    session.abort("cut by the test")

        kill = (lambda: served.kill("attention-2")) if cut == "holder" else (lambda: served.call(harm))
        in_their_midst(served, models[4], pool, prompts_of(400, 60, 280, 150), 120, kill)
