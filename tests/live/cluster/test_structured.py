"""Answers that must match a grammar, in whole clusters: with a pipeline, after pre-emption and after a node died."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.conductor import Route
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.streams import AnswerStream
from tests.inside import inside
from tests.live.cluster.kit import STEADY
from tests.live.cluster.test_deaths import entries
from tests.models import EOS, make_model
from tests.schemas import breaking, object_schema, validate
from tests.served import LIMIT_S, Client, streamed

END = 257
"""Of the tokenizer of bytes."""
LIMIT = 1000


def asked(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"response_format": form, **fields}


def long_schema(seed: int) -> dict[str, Any]:
    """Several hundred tokens."""
    items = object_schema(random.Random(seed), 1)
    return {
        "type": "array",
        "items": items | {"required": list(items["properties"])},
        "minItems": 8,
        "maxItems": 9,
    }


def check(tokens: list[int], schema: dict[str, Any], end: int = END) -> None:
    """It ends of itself, with one end token."""
    assert tokens.count(end) == 1 and tokens[-1] == end
    validate(bytes(tokens[:-1]), schema)


def ask_all(client: Client, seeds: range, schema_of: Any, **fields: Any) -> list[list[int]]:
    """All at once, half of them greedy."""

    def ask(seed: int) -> list[int]:
        given = {"temperature": seed % 2} | fields
        return client.tokens([seed, 1, 2, 3], LIMIT, **asked(schema_of(seed), **given))

    with ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(ask, seeds))


def test_an_answer_is_the_same_and_whole_when_its_decode_node_dies(tmp_path: Path) -> None:
    """While four answers go on, with and without `ignore_eos`: none goes on until the node is dead."""
    flight, seeds = tmp_path / "flight.jsonl", range(4)
    begun, killed = threading.Event(), threading.Event()
    with inside(emulated(prefill=1, decode=2) | {"record": str(flight)}) as served:

        def wait(process: NodeProcess) -> None:
            if process.node.node != "prefill-0" and all(each.generated for each in streams()):
                begun.set()
                assert killed.wait(LIMIT_S)

        def streams() -> list[AnswerStream]:
            return list(served.head._streams.values())

        undisturbed = ask_all(served, seeds, long_schema, temperature=0)
        with served.stepping(wait), served.together(len(seeds)), ThreadPoolExecutor(len(seeds)) as pool:
            answers = [
                pool.submit(
                    streamed, served, [seed, 1, 2, 3], LIMIT, threading.Event(),
                    **asked(long_schema(seed), ignore_eos=bool(seed % 2)),
                )
                for seed in seeds
            ]  # fmt: skip
            assert begun.wait(LIMIT_S)
            views = served.head._desk.conductor.view.requests
            served.kill(served.call(lambda: next(iter(views.values())).decode.node))
            killed.set()
            assert [answer.result() for answer in answers] == undisturbed
    routes = sum(isinstance(action, Route) for entry in entries(flight) for action in entry.actions)
    assert routes > 2 * len(seeds), "no answer was under way when the node died"
    for seed, tokens in zip(seeds, undisturbed, strict=True):
        check(tokens, long_schema(seed))


def emulated(**roles: Any) -> dict[str, Any]:
    curve = STEADY | {"decode_fixed_s": 1e-4, "prefill_token_s": 1e-5}
    return {"roles": roles, "engine": {"kind": "emulated", "cost": curve, "token_budget": 64}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured") / "llama"
    make_model(folder, "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def test_answers_that_were_pre_empted_are_those_of_others(llama: Path) -> None:
    found = []
    for kv_memory in ("16MiB", "768KiB"):
        config = {"model": str(llama), "engine": {"kv_memory": kv_memory}, "cache": {"dram": kv_memory}}
        with inside(config) as cluster:
            with cluster.together(4):
                found.append(ask_all(cluster, range(4), long_schema, seed=5))
            preempted = cluster.total("num_preemptions_total")
    assert preempted > 0
    assert found[0] == found[1]
    for seed, tokens in enumerate(found[0]):
        check(tokens, long_schema(seed), EOS)


HOSTILE = {
    "what takes ever longer": 'start: a\na: a b | b a | "x"\nb: a a | "x" | ""\n',
    "what breaks the library": f"start: %json {json.dumps(breaking(), separators=(',', ':'))}",
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_a_grammar_that_cannot_be_followed_fails_its_own_request_alone(grammar: str) -> None:
    """One in the midst of its answer, the other before."""
    with inside(emulated(prefill=1, decode=1)) as cluster, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(ask_all, cluster, range(3), long_schema)
        body = {
            "model": cluster.model, "prompt": [1, 2], "max_tokens": 2500, "min_tokens": 2400,
            "guided_grammar": grammar,
        }  # fmt: skip
        reply = cluster.http.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert "cannot be followed: " in reply.json()["error"]["message"]
        for seed, tokens in enumerate(beside.result()):
            check(tokens, long_schema(seed))
