"""Prompts put together from others' KV, by a whole cluster over HTTP: with the tokens of one engine that does the same,
never of another tenant, and never with anything in the exact cache that is not exact."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest

from isthmus.bench.reuse_runs import Prompts, Setting
from isthmus.config import key_digest
from isthmus.core.reuse import CACHEBLEND, EPIC, SEMANTIC, Selection
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.engine import Engine, EngineOptions
from tests.inside import Inside, inside
from tests.live.cluster.kit import flip_bits
from tests.live.engine.hybrids import save_tiny
from tests.models import check_greedy, make_model
from tests.served import LIMIT_S

NUM_TOKENS = 12
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
SLOW = {"kv_token_bytes": 768, "num_layers": 24, "prefill_token_s": 1e-3, "decode_fixed_s": 1e-3}
"""What the conductor is told of the engine: so slow, and with so many layers, that moving KV always pays."""
FIELDS = ("exact_tokens", "moved_tokens", "similar_tokens", "recomputed_tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reuse") / "model"
    make_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Prompts:
    """One engine, without a cluster."""
    return Prompts(Engine(model, EngineOptions(threads=1, kv_bytes=16 << 20, dtype="float32")))


def deployment(model: Path, roles: dict[str, int], **sections: Any) -> dict[str, Any]:
    cache = {"dram": 2000 * BLOCK_BYTES} | sections.pop("cache", {})
    reuse = {"min_tokens": 100} | sections.pop("reuse", {})
    return {
        "model": str(model),
        "roles": {"prefill": 0, "decode": 0, "mixed": 0} | roles,
        "engine": {"cost": SLOW, "dtype": "float32"},
        "cache": cache,
        "reuse": reuse,
        **sections,
    }


def text(seed: int, count: int, letters: int = 0) -> list[int]:
    """Of a hundred of the 256 bytes, those from `letters` on: others have another signature."""
    rng = random.Random(seed)
    return [letters + rng.randrange(100) for _ in range(count)]


def joined(parts: Sequence[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def changed(tokens: Sequence[int], seed: int) -> list[int]:
    """A tenth of the words are others, and some more are in front of all."""
    rng = random.Random(seed)
    return text(seed, 5) + [rng.randrange(100) if rng.random() < 0.1 else token for token in tokens]


def ask(served: Inside, prompt: Sequence[int], reuse: str, **fields: Any) -> tuple[list[int], dict[str, int]]:
    """The answer, and where the prompt's KV came from."""
    body = {"model": served.model, "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0}
    headers = {"x-isthmus-reuse": reuse} | fields.pop("headers", {})
    body |= {"return_token_ids": True, "ignore_eos": True, **fields}
    reply = served.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    details = usage["prompt_tokens_details"]
    if reuse != "exact":
        assert sum(details[field] for field in FIELDS) == usage["prompt_tokens"] == len(prompt)
        assert details["exact_tokens"] == details["cached_tokens"]
    return reply.json()["choices"][0]["token_ids"], details


def of_one_engine(
    alone: Prompts, donor: Sequence[int], target: Sequence[int], selection: Selection
) -> tuple[list[int], int, int]:
    """The answer, moved and similar tokens of the same prompt, assembled of the same donor."""
    alone.donate(donor)
    setting = Setting(selection.name, selection)
    answer = alone.assembled(target, setting, [0], NUM_TOKENS).tokens
    alone.spoil(setting.spoil)
    _, reused, _ = alone.prefill(target, setting)
    return answer, reused.moved, reused.similar


@pytest.mark.parametrize(
    ("roles", "selection"),
    [({"mixed": 1}, SEMANTIC), ({"prefill": 1, "decode": 1}, CACHEBLEND), ({"prefill": 2, "decode": 1}, EPIC)],
    ids=["mixed semantic", "1P1D CacheBlend", "2P1D EPIC"],
)
def test_its_tokens_are_those_of_one_engine_that_does_the_same(
    model: Path, alone: Prompts, roles: dict[str, int], selection: Selection
) -> None:
    """And the exact answer to the same prompt, asked for afterwards, is transformers'."""
    reuse = "semantic" if selection.alike else "chunks"
    selector = "cacheblend" if selection.alike else selection.name
    first, second = text(1, 300), text(2, 300)
    donor = first + second
    target = changed(donor, 3) if selection.alike else text(4, 20) + second + first + text(5, 40)
    with inside(deployment(model, roles, reuse={"selector": selector})) as served:
        ask(served, donor, reuse)
        served.check_idle()  # what has a name is where the conductor believes it
        answer, details = ask(served, target, reuse)
        assert (answer, details["moved_tokens"], details["similar_tokens"]) == of_one_engine(
            alone, donor, target, selection
        )
        assert details["moved_tokens"] + details["similar_tokens"] > 100
        served.check_idle()
        exact, details = ask(served, target, "exact")
        assert details["cached_tokens"] == 0, "nothing of what was assembled has a name"
        check_greedy(model, target, exact)
        served.check_idle()
        assert ask(served, target, "exact")[1]["cached_tokens"] > 500


def test_several_donors_of_two_nodes(model: Path) -> None:
    """Each of four documents was read on one of two nodes; a prompt of all four is put together of them."""
    documents = [text(10 + number, 300) for number in range(4)]
    with inside(deployment(model, {"prefill": 2, "decode": 1}, policy="round_robin")) as served:
        for number, document in enumerate(documents):
            ask(served, document + text(20 + number, 16), "chunks")
        served.check_idle()
        rng, found = random.Random(30), []
        for number in range(6):
            chosen = rng.sample(documents, 4)
            prompt = text(40 + number, 16) + joined(chosen) + text(50 + number, 40)
            answer, details = ask(served, prompt, "chunks")
            found.append(details["moved_tokens"])
            assert len(answer) == NUM_TOKENS
        assert min(found) > 400
        served.wait_until(
            lambda: served.total("kv_bytes_borrowed_total") + served.total("kv_bytes_fetched_total") > 0,
            "a document comes from the other node",
        )
        served.check_idle()


def test_a_short_or_another_prompt_is_answered_as_if_nobody_had_asked(model: Path) -> None:
    """The normal path, by tokens and by route: nothing alike, fewer tokens than pay, no donor."""
    donor = text(60, 400)
    with inside(deployment(model, {"prefill": 1, "decode": 1})) as served:
        ask(served, donor, "semantic")
        served.check_idle()
        for prompt in (text(61, 400, letters=100), donor[200:290], text(62, 90)):
            answer, details = ask(served, prompt, "semantic")
            assert details["moved_tokens"] == details["similar_tokens"] == details["exact_tokens"] == 0
            check_greedy(model, prompt, answer)
        answer, details = ask(served, donor, "semantic")
        assert details["exact_tokens"] == 399 and details["recomputed_tokens"] == 1, "it is its own prefix"
        check_greedy(model, donor, answer)


def test_no_tenant_is_helped_by_another(model: Path) -> None:
    """Whatever it says: forty probes of another tenant's prompts, or of another salt, find nothing. The first
    tenant's own are found."""
    keys = [{"tenant": tenant, "sha256": key_digest(tenant)} for tenant in ("acme", "globex")]
    config = deployment(
        model,
        {"prefill": 1, "decode": 1},
        auth={"keys": keys},
        reuse={"tenants": {"globex": "semantic"}},
        cache={"dram": 8000 * BLOCK_BYTES},
    )
    documents = [text(70 + number, 400) for number in range(5)]
    with inside(config, key="acme") as served:
        for document in documents:
            ask(served, document, "chunks")
        rng = random.Random(80)
        with ThreadPoolExecutor(4) as pool:
            probes = []
            for number in range(40):
                prompt = text(100 + number, rng.randrange(20)) + joined(rng.sample(documents, 2))
                who: dict[str, Any] = {"headers": {"Authorization": "Bearer globex"}}
                if number % 2:
                    who["cache_salt"] = rng.choice(["4:acme:", "acme", ""]) + str(number)
                if number % 4 == 3:
                    who = {"cache_salt": f"own {number}"}  # the first tenant itself, apart from itself
                probes.append(pool.submit(ask, served, prompt, rng.choice(["chunks", "semantic"]), **who))
            found = [probe.result()[1] for probe in probes]
        # Globex finds what globex asked before, where that had the same salt; never acme's, which was there first.
        fresh = [details for number, details in enumerate(found) if number % 4 in (1, 3)]
        assert {details["moved_tokens"] + details["similar_tokens"] for details in fresh} == {0}
        assert not any(details["exact_tokens"] for details in fresh)
        _, details = ask(served, text(300, 8) + documents[1] + documents[0], "chunks")
        assert details["moved_tokens"] > 50
        served.check_idle()


def test_the_users_of_one_key_are_apart(model: Path) -> None:
    """Without keys the field `user` says whose a prompt is."""
    document = text(90, 300)
    with inside(deployment(model, {"mixed": 1})) as served:
        ask(served, document, "chunks", user="one")
        served.check_idle()
        other = ask(served, text(91, 8) + document, "chunks", user="other")[1]
        own = ask(served, text(92, 8) + document, "chunks", user="one")[1]
    assert other["moved_tokens"] == 0 < own["moved_tokens"]


def test_donors_on_disk_and_damaged_ones(model: Path, tmp_path: Path) -> None:
    """Read back after a restart, nobody is remembered: what is assembled then is of prompts read since. A damaged file
    costs time and no wrong token."""
    config = deployment(
        model,
        {"mixed": 1},
        cache={"dram": 40 * BLOCK_BYTES, "ssd": 2000 * BLOCK_BYTES, "folder": str(tmp_path / "blocks")},
    )
    documents = [text(500 + number, 300) for number in range(6)]
    with inside(config) as served:
        for document in documents:
            ask(served, document, "chunks")
        served.wait_until(lambda: served.total("cache_disk_blocks") >= 60, "written behind")
        _, details = ask(served, text(510, 10) + documents[0] + documents[1], "chunks")
        assert details["moved_tokens"] > 300, "donors are read from the disk"
        flip_bits(tmp_path / "blocks", 400)
        for number in range(6):
            prompt = text(520 + number, 10) + documents[number] + documents[(number + 2) % 6]
            answer, details = ask(served, prompt, "chunks")
            if not details["moved_tokens"]:
                check_greedy(model, prompt, answer)
        served.check_idle()


def test_a_packed_answer_goes_on_after_its_home_died(model: Path) -> None:
    """With what was sent so far: the next attempt computes the prompt, exactly, and the client sees no gap."""
    donor = text(600, 500)
    with inside(deployment(model, {"prefill": 1, "decode": 2})) as served:
        ask(served, donor, "semantic")
        body = {
            "model": served.model, "prompt": changed(donor, 601), "max_tokens": 400, "temperature": 0,
            "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        tokens, killed, steps, headers = 0, threading.Event(), count(), {"x-isthmus-reuse": "semantic"}

        def wait(process: NodeProcess) -> None:
            """The answer does not end before its home does."""
            if process.node.node.startswith("decode") and next(steps) > 50:
                killed.wait(LIMIT_S)

        with (
            served.stepping(wait),
            served.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply,
        ):
            for line in reply.iter_lines():
                event = line.removeprefix("data: ")
                if '"token_ids"' in event:
                    tokens += len(json.loads(event)["choices"][0]["token_ids"])
                if tokens >= 5 and not killed.is_set():
                    [home] = served.call(
                        lambda: [
                            each.decode.node for each in served.head._desk.conductor.view.requests.values()
                        ]
                    )
                    served.kill(home)
                    killed.set()
        assert tokens == 400 and killed.is_set()
        served.check_idle()


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3_next", "has recurrent layers"),
        ("deepseek_v3", "keeps latent vectors"),
        ("window", "sliding windows"),
    ],
)
def test_models_whose_kv_cannot_be_moved_refuse_it_with_the_reason(
    tmp_path: Path, family: str, why: str
) -> None:
    """And answer all the same where the deployment alone asks for it."""
    folder = tmp_path / "model"
    if family == "window":
        make_model(folder, "mistral", sliding_window=40)
    else:
        save_tiny(family, folder)
    config = deployment(folder, {"mixed": 1}, cache={"dram": "16MiB"}, reuse={"default": "semantic"})
    del config["engine"]["dtype"]
    with inside(config) as served:
        body = {"model": served.model, "prompt": text(700, 300), "max_tokens": 2}
        reply = served.http.post("/v1/completions", json=body, headers={"x-isthmus-reuse": "chunks"})
        assert reply.status_code == 400 and why in reply.json()["error"]["message"]
        reply = served.http.post("/v1/completions", json=body)
        assert reply.status_code == 200
        assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_without_a_cache_nothing_is_remembered_and_who_asks_is_told(model: Path) -> None:
    with inside(deployment(model, {"mixed": 1}, cache={"dram": 0})) as served:
        body = {"model": served.model, "prompt": text(701, 300), "max_tokens": 2}
        reply = served.http.post("/v1/completions", json=body, headers={"x-isthmus-reuse": "semantic"})
        assert reply.status_code == 400 and "give cache.dram" in reply.json()["error"]["message"]
