"""KV on several nodes together with everything else a request may meet, through the API; tokens are those of
transformers, and nothing is left on any node."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.node import guests
from isthmus.core.types import NS_PER_S
from isthmus.live.cluster.process import EngineProcess
from isthmus.live.kv import hosting
from isthmus.live.messenger import Session
from isthmus.live.messenger.line import Answerer, LineLost
from tests.inside import Inside, inside
from tests.live.cluster.test_exact_pool import SLOW, prompt_of
from tests.live.cluster.test_structured import asked as in_form
from tests.live.cluster.test_structured import check as check_form
from tests.models import EOS, check_greedy, make_model, reference_logits
from tests.served import LIMIT_S, Client, streamed

BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
NODE_BLOCKS = 12
NODE_TOKENS = 16 * NODE_BLOCKS
ONE = {"prefill": 0, "decode": 0, "mixed": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, kv_heads in (("GQA", 2), ("MHA", 4)):
        made[name] = tmp_path_factory.mktemp("elsewhere") / name
        make_model(made[name], "llama", num_key_value_heads=kv_heads)
        (made[name] / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return made


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["GQA"]


def deployment(model: Path, roles: dict[str, Any], blocks: int = NODE_BLOCKS, **cache: Any) -> dict[str, Any]:
    """So many blocks of memory for each node that computes."""
    return {
        "model": str(model),
        "roles": {"prefill": 0, "decode": 0} | roles,
        "engine": {"cost": SLOW, "token_budget": 64, "kv_memory": blocks * BLOCK_BYTES, "max_sequences": 4},
        "cache": {"dram": 0} | cache,
    }


def attending(
    model: Path, roles: dict[str, Any] = ONE, *, blocks: int = 60, count: int = 2, **cache: Any
) -> Any:
    """With nodes of role attention, which have the KV of every prompt."""
    return deployment(
        model, roles | {"attention": {"count": count, "kv_memory": blocks * BLOCK_BYTES}}, **cache
    )


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


@pytest.mark.parametrize("heads", ["GQA", "MHA"])
@pytest.mark.parametrize("holders", [2, 3, 5])
def test_so_many_holders(holders: int, heads: str, models: dict[str, Path]) -> None:
    """As much as must goes to those that have room, so the last has less; of a short prompt nobody has anything."""
    total = int((holders + 0.5) * NODE_TOKENS)
    blocks = NODE_BLOCKS * (2 if heads == "MHA" else 1)  # twice as large
    with inside(deployment(models[heads], {"mixed": holders + 1}, blocks)) as served:
        ask(served, models[heads], prompt_of(1, 30))
        assert attended(served) == {}
        ask(served, models[heads], prompt_of(2, total - 20))
        served.wait_until(lambda: len(attended(served)) == holders, f"questions to {holders}")
        ask(served, models[heads], prompt_of(3, total - 3), 3)
        served.wait_until(lambda: not any(served.gauge("kv_blocks_hosted").values()), "room comes back")


def test_what_travels(model: Path) -> None:
    """There are queries and sums, of as many rows, and each block of KV once."""
    with inside(attending(model, count=1)) as served:
        [home, holder] = [each.mover for each in served.processes]
        for length in (33, 400):
            ask(served, model, prompt_of(length, length), 9)
        served.check_idle()
        sent, received = home.holders.bytes_asked, home.holders.bytes_answered
        assert (
            sent % (4 * 16 * 4) == 0 and received * 16 == sent * 17
        )  # 4 heads of 16 numbers, and a number each
        shipped = home.shipments.bytes_out
        assert shipped % BLOCK_BYTES == 0 and 24 * BLOCK_BYTES <= shipped <= 27 * BLOCK_BYTES
        assert holder.hosts.bytes_in <= shipped


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_a_prefix_is_used_again(tier: str, model: Path, tmp_path: Path) -> None:
    """What is cached is loaded at home and shipped as if it were computed."""
    cache: dict[str, Any] = {"dram": 40 * BLOCK_BYTES}
    if tier == "ssd":
        cache = {"dram": 8 * BLOCK_BYTES, "ssd": 200 * BLOCK_BYTES, "folder": str(tmp_path)}
    prompt = prompt_of(5, 400)
    with inside(attending(model, **cache)) as served:
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
    with inside(attending(model, blocks=12)) as served:
        ask_all(served, model, [prompt_of(at, 30) for at in range(6)], 150)
        served.wait_until(
            lambda: attended(served) and served.total("num_preemptions_total") > 0, "pre-emptions"
        )


def test_two_clusters(model: Path) -> None:
    """Computed in one, held and answered in the other; but what is longer than the memory of a node, all in one."""
    memory = {"kv_memory": NODE_BLOCKS * BLOCK_BYTES}
    east = {"prefill": memory, "decode": memory, "attention": {"count": 2, "kv_memory": 60 * BLOCK_BYTES}}
    settings = deployment(model, {}) | {
        "clusters": {
            "east": {"roles": {name: {"count": 1} | each for name, each in east.items()}},
            "west": {"roles": {"prefill": {"count": 1, "kv_memory": 60 * BLOCK_BYTES}}},
        },
        "links": [{"between": ["west", "east"], "gbps": 10, "rtt_ms": 1}],
        "offload": {"threshold": 100, "control": "none", "period_s": 0.1},
    }
    del settings["roles"]
    with inside(settings) as served:
        for length in (40, 300, 150):
            ask(served, model, prompt_of(length, length))
        ask_all(served, model, [prompt_of(at, length) for at, length in enumerate((60, 250, 130, 30))])
        assert set(attended(served)) == {"east-attention-0", "east-attention-1"}
        assert served.gauge("tokens_computed_total")["west-prefill-0"] >= 150
        assert served.gauge("kv_bytes_shipped_total")["west-prefill-0"] >= 9 * BLOCK_BYTES


@pytest.mark.parametrize("roles", [ONE, {"prefill": 1, "decode": 1}], ids=["one", "1P1D"])
def test_who_is_cancelled_leaves_nothing(roles: dict[str, int], model: Path) -> None:
    """While the prompt is computed, and in the midst of the answer."""
    with inside(attending(model, roles)) as served:
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


def test_answers_in_a_form(model: Path) -> None:
    schema = {"enum": ["where it was computed", "with one of those who attend to it", "nowhere"]}
    with inside(attending(model)) as served:
        for seed in range(3):
            body = in_form(schema, seed=seed, temperature=seed % 2)
            check_form(served.tokens(prompt_of(seed, 300), 120, **body), schema, EOS)
        assert attended(served)


def test_probabilities_are_those_of_one_memory(model: Path) -> None:
    """Of the answer and of the prompt."""
    prompt = prompt_of(4, 300)
    fields = {"logprobs": 2, "prompt_logprobs": 1}
    with inside(attending(model)) as served:
        [there] = ask(served, model, prompt, 6, **fields)["choices"]
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


# Faults.


def home_of(served: Inside) -> EngineProcess:
    [home] = [each for each in served.processes if each._facts.node == "mixed-0"]
    return home


def harmed(served: Inside, model: Path, prompt: list[int], num_tokens: int = 40) -> None:
    """An answer that goes on while something breaks, once."""
    answering = threading.Event()
    answer = streamed(served, prompt, num_tokens, answering, ignore_eos=True)
    assert len(answer) == num_tokens
    check_greedy(model, prompt, answer)


def test_damaged_kv_is_never_attended_to(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a shipment flips in the memory of the holder: its seal does not match; the next attempt goes well."""
    damaged: list[int] = []
    receive = hosting.Hosts.receive

    def flip(self: hosting.Hosts, session: Session, head: Any) -> None:
        guest = self._guests.get(head.key)
        if guest is not None and head.layer == 1 and not damaged:
            size = guest.landing.memory.layout.block_size
            block = guest.blocks[head.first]
            guest.landing.memory.export(head.layer, block * size, (block + 1) * size)[7] ^= 1
            damaged.append(head.first)
        receive(self, session, head)

    monkeypatch.setattr(hosting.Hosts, "receive", flip)
    with inside(attending(model)) as served:
        harmed(served, model, prompt_of(1, 300))
        assert damaged
        served.wait_until(lambda: served.total("seal_mismatches_total") == 1, "the mismatch is counted")


@pytest.mark.parametrize("cut", ["line", "session"])
def test_a_session_that_is_cut_costs_an_attempt(cut: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "LEASE_NS", NS_PER_S // 2)  # who was cut off claims nothing: idle is waited for

    with inside(attending(model)) as served, ThreadPoolExecutor(1) as pool:

        def harm() -> int:
            home = home_of(served)
            lines = home.mover.holders._lines
            for holder, line in list(lines.items()):
                if cut == "line":
                    line.result().asker.hang_up()
                elif (session := home.peers.open_to(holder)) is not None:
                    session.abort("cut by the test")
            return len(lines)

        with served.held() as steps:
            answer = pool.submit(harmed, served, model, prompt_of(1, 300), 120)
            served.wait_until_asked(1)
            steps.let(100)
            served.wait_until(lambda: attended(served), "questions")
            assert served.call(harm) >= 1
        answer.result()


def test_a_holder_that_says_nothing_costs_an_attempt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the question, and its thread is gone."""
    serve = hosting.Hosts._serve
    silenced = threading.Event()

    def mute(self: hosting.Hosts, line: Answerer) -> None:
        if silenced.is_set():
            serve(self, line)
            return
        silenced.set()
        home_of(served).mover.holders._answer_s = LIMIT_S  # of the lines that are answered
        try:
            line.next()
            line.next()
        except LineLost:
            return

    monkeypatch.setattr(hosting.Hosts, "_serve", mute)
    with inside(attending(model, count=1)) as served:
        home_of(served).mover.holders._answer_s = 0.5
        harmed(served, model, prompt_of(1, 200), 10)
    assert silenced.is_set()
