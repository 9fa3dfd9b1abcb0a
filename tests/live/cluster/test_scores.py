"""Scores of prompts through whole clusters: of every prompt that asks, once and whole, wherever it is computed, cut off
or computed again, and with nothing of it taken from a cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.core.conductor import Route
from isthmus.core.cost import compile_cost
from isthmus.core.types import Generated, Job, RequestId, Sampling, TokenLogprobs
from isthmus.live.cluster.streams import AnswerStream
from isthmus.live.engine.emulated import EmulatedEngine, Recipe
from isthmus.live.engine.interface import Chunk
from tests.inside import Inside, inside
from tests.live.cluster.test_exact import prompt_of
from tests.live.cluster.test_virtual import CACHES, CURVE, MOVES, cluster_of, workload, wrong_answers
from tests.live.engine.hybrids import save_tiny
from tests.live.engine.test_scores import check
from tests.models import check_greedy, make_model, reference_logits
from tests.virtual import Flight, VirtualRequest

MS = 1_000_000


def scores_of(recipe: Recipe, prompt: Sequence[int], num_top: int, salt: str = "") -> tuple[TokenLogprobs, ...]:
    """Of the emulated model, in one piece."""
    num_blocks = -(-len(prompt) // recipe.layout.block_size) + recipe.layout.least_blocks
    engine = EmulatedEngine(recipe, compile_cost(CURVE), num_blocks, max_length=len(prompt))
    chunk = Chunk(prompt, 0, range(num_blocks), False, salt=salt, targets=prompt[1:], num_top=num_top)
    found = list[TokenLogprobs]()
    engine.step(engine.build([chunk]), [], on_scores=lambda index, position, told: found.extend(told))
    return tuple(found)


def check_scores(recipe: Recipe, requests: Sequence[VirtualRequest], flight: Flight) -> None:
    """Of those that ask, with the first token, and nothing of them was cached."""
    for request, outcome in zip(requests, flight.outcomes, strict=True):
        assert outcome.error is None
        first, *rest = outcome.generated
        assert all(each.prompt_logprobs is None for each in rest)
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            assert first.prompt_logprobs is None
        else:
            assert first.prompt_logprobs == scores_of(recipe, request.tokens, wanted, request.salt)
            assert first.cached_tokens == 0
    counted = [action for entry in flight.log for action in entry.actions if isinstance(action, Route)]
    asks = {str(at) for at, request in enumerate(requests) if request.sampling.prompt_logprobs is not None}
    for route in counted:
        if route.request in asks:
            assert not (route.num_cached or route.fetch or route.recall or route.handover_start)


def asking(requests: Sequence[VirtualRequest]) -> list[VirtualRequest]:
    """Every second of them asks for scores, with different tops."""
    return [
        replace(each, sampling=Sampling(temperature=0.0, prompt_logprobs=at % 3 if at % 2 else None))
        for at, each in enumerate(requests)
    ]


def repeated(requests: Sequence[VirtualRequest]) -> list[VirtualRequest]:
    """Each prompt again and again when the first answer is long over: plain, scored, plain."""
    texts = [replace(each, sampling=Sampling(temperature=0.0)) for each in requests]
    scored = [replace(each, sampling=Sampling(temperature=0.0, prompt_logprobs=1)) for each in requests]
    turns = [texts, scored, texts]
    return [
        replace(each, arrival_ns=each.arrival_ns + turn * 3_000 * MS)
        for turn, each_of in enumerate(turns)
        for each in each_of
    ]


@pytest.mark.parametrize("move", ["pre-empted", "all die", "a group dies"])
def test_they_are_whole_after_every_move(move: str) -> None:
    faults, shape = MOVES[move]
    cluster = cluster_of(faults, **{"cache__dram": "4MiB", "engine__token_budget": 64} | shape)
    requests = asking(workload(20, every_ns=MS // 4))
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    check_scores(cluster.recipe, requests, flight)


@pytest.mark.parametrize("cache", ["on the SSD", "all full", "of others"])
def test_a_warm_cache_is_not_asked(cache: str) -> None:
    """Who does not ask has what it had before."""
    cluster = cluster_of(engine__token_budget=128, **CACHES[cache])
    requests = repeated(workload(12))
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    check_scores(cluster.recipe, requests, flight)
    if cache != "all full":
        plain = [outcome.generated[0].cached_tokens or 0 for outcome in flight.outcomes[24:]]
        assert sum(plain) > 1000, "the cache was cold"


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[RequestId]:
    """How often a prompt is scored again from its start, by request."""
    again, original = Counter[RequestId](), AnswerStream.score

    def score(stream: AnswerStream, first: int, logprobs: Sequence[TokenLogprobs]) -> None:
        again[stream.job.request] += first < len(stream._scores)
        assert not stream.generated, "scored again though the first token was there"
        original(stream, first, logprobs)

    monkeypatch.setattr(AnswerStream, "score", score)
    return again


def test_pre_emption_amid_a_prompt_scores_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven answers grow on a mixed node, until they take the blocks of a prompt that is half computed."""
    again = counted(monkeypatch)
    shape = {"roles__prefill": 0, "roles__decode": 0, "roles__mixed": 1}
    cluster = cluster_of(engine__kv_memory="1MiB", engine__token_budget=12, **shape)
    short = [VirtualRequest(0, tuple(prompt_of(seed, 20)), 200) for seed in range(7)]
    requests = asking([*short, VirtualRequest(0, tuple(prompt_of(99, 500)), 5)])
    flight = cluster.run(requests)
    assert wrong_answers(cluster, requests, flight) == 0
    check_scores(cluster.recipe, requests, flight)
    assert again[RequestId("7")] > 0, "it was not pre-empted"


# On real sockets, with models of float arithmetic.


def asked(
    served: Inside, name: str, prompt: Sequence[int], sampling: Sampling, count: int = 8
) -> list[Generated]:
    """A request as the gateway hands it over."""

    async def work() -> list[Generated]:
        job = Job(RequestId(name), tuple(prompt), count, sampling)
        return [each async for batch in served.head.submit(job) for each in batch]

    return asyncio.run_coroutine_threadsafe(work(), served._loop).result(60)


def check_served(settings: dict[str, Any], folder: Path, *lengths: int) -> None:
    """Plain, then scored beside each other while the cache is warm, then plain again: the same tokens each time."""
    plain, scored = Sampling(temperature=0.0), Sampling(temperature=0.0, prompt_logprobs=5)
    prompts = [prompt_of(seed, length) for seed, length in enumerate(lengths)]
    with inside({"model": str(folder), **settings}) as served, ThreadPoolExecutor(len(prompts)) as pool:
        turns = []
        for turn, how in enumerate((plain, scored, plain)):
            ask = partial(
                lambda at, turn, how: asked(served, f"{turn} {at}", prompts[at], how), turn=turn, how=how
            )
            turns.append(list(pool.map(ask, range(len(prompts)))))
            served.check_idle()  # the cache is warm
    for at, prompt in enumerate(prompts):
        first, found, again = (turn[at] for turn in turns)
        check_greedy(folder, prompt, [each.token for each in first])
        assert (
            [each.token for each in found] == [each.token for each in first] == [each.token for each in again]
        )
        assert found[0].cached_tokens == 0 and found[0].prompt_logprobs is not None
        assert (again[0].cached_tokens or 0) >= (len(prompt) - 1) // 16 * 16
        check(dict(enumerate(found[0].prompt_logprobs, 1)), prompt, reference_logits(folder, prompt))
        assert all(each.prompt_logprobs is None for each in (*first, *found[1:], *again))


SERVED: dict[str, dict[str, Any]] = {
    "1P1D": {},
    "mixed": {"roles": {"prefill": 0, "decode": 0, "mixed": 1}, "cache": {"dram": 0}},
    "a group": {"roles": {"prefill": {"count": 2, "pipeline": 2}, "decode": 1}},
}


@pytest.mark.parametrize("shape", SERVED)
def test_a_running_cluster_scores_as_transformers_does(shape: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama", tie_word_embeddings=shape == "mixed")
    settings = {"cache": {"dram": "16MiB"}, "engine": {"token_budget": 64}} | SERVED[shape]
    check_served(settings, tmp_path / "model", 1, 2, 16, 17, 64, 65, 300)


def test_and_with_recurrent_layers(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_next", tmp_path / "model")
    check_served({"cache": {"dram": "16MiB"}, "engine": {"token_budget": 64}}, folder, 2, 33, 200)


@pytest.mark.parametrize("shape", SERVED)
def test_a_prompt_that_fills_a_node_s_memory_is_scored(shape: str, tmp_path: Path) -> None:
    """The token that comes with the scores, which nobody asked for, has no place there."""
    make_model(tmp_path / "model", "llama", max_position_embeddings=512)
    memory = {"cache": {"dram": 0}, "engine": {"kv_memory": "192KiB"}}
    with inside({"model": str(tmp_path / "model"), **memory, **SERVED[shape]}) as served:
        room = served.http.get("/v1/models").json()["data"][0]["max_model_len"]
        assert room < 512
        [choice] = served.complete(list(prompt_of(1, room)), 0, echo=True, logprobs=0)["choices"]
        served.check_idle()
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == room and None not in scores[1:]
    assert choice["finish_reason"] == "length" and choice["token_ids"] == []
