"""Models with recurrent layers and with latent attention: chunks, cached prefixes, hand-overs, pre-emption and tiers
change no token of what transformers' `generate` returns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.engine import Engine, EngineOptions
from tests.inside import Inside, inside
from tests.live.cluster.test_exact_pool import NUM_TOKENS, SLOW, Chat, prompt_of
from tests.live.engine.hybrids import FAMILIES, save_tiny
from tests.models import check_greedy

RECURRENT = ("qwen3_next", "kimi_linear")
SIZE = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return {family: save_tiny(family, folder / family) for family in FAMILIES}


def deployment(model: Path, **settings: Any) -> dict[str, Any]:
    engine = {"cost": SLOW, **settings.pop("engine", {})}
    return {"model": str(model), "engine": engine, "policy": "mooncake", **settings}


def layout_of(model: Path) -> KVLayout:
    return Engine(model, EngineOptions(kv_bytes=1 << 24, max_sequences=2)).layout


def check_all(served: Inside, model: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> None:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        with served.held():
            answering = pool.map(lambda prompt: served.tokens(prompt, num_tokens, ignore_eos=True), prompts)
            served.wait_until_asked(len(prompts))
        answers = list(answering)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == num_tokens
        check_greedy(model, prompt, answer)


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    return [prompt_of(seed + at, length) for at, length in enumerate(lengths)]


@pytest.mark.parametrize(("family", "cached"), [("qwen3_next", False), *[(each, True) for each in FAMILIES]])
def test_handed_over_in_chunks_and_again_from_the_cache(
    family: str, cached: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Prefixes are reused from the engine's own memory, or from the cache beside it."""
    cache = {"dram": "32MiB", "ssd": "32MiB", "folder": str(tmp_path / "blocks")} if cached else {"dram": 0}
    config = deployment(models[family], cache=cache, engine={"token_budget": 50})
    chat = Chat(models[family], prompt_of(1, 333))
    with inside(config) as served:
        assert chat.turn(served) == 0
        if family in RECURRENT:  # as far as the snapshot before the first question's end
            assert chat.turn(served, prompt_of(2, 20)) == 332 // SIZE * SIZE
        else:
            chat.turn(served, prompt_of(2, 20))
        other = Chat(models[family], chat.tokens[:200] + prompt_of(3, 90))
        found = other.turn(served)
        again = Chat(models[family], chat.tokens[:200] + prompt_of(4, 50)).turn(served)
        # KV of 192 tokens is there and no state; computing them leaves one where the prompts part.
        assert (found, again) == ((0, 192) if family in RECURRENT else (192, 192))
        check_all(served, models[family], prompts_of(20, 1, 15, 16, 17, 64, 130, 5, 48))
    if cached:
        with inside(config) as served:
            kept = (len(other.tokens) - NUM_TOKENS - 1) // SIZE * SIZE
            served.wait_until(lambda: served.total("cache_disk_blocks") > 0, "blocks on the disk")
            prompt = other.tokens[:-NUM_TOKENS]
            assert Chat(models[family], prompt).turn(served) == kept, "from the SSD after a restart"


def test_two_of_each_with_little_memory(models: dict[str, Path]) -> None:
    """Blocks are evicted, and prefixes fetched between nodes with their states."""
    family = "qwen3_next"
    layout = layout_of(models[family])
    config = deployment(
        models[family],
        roles={"prefill": 2, "decode": 2},
        cache={"dram": 48 * layout.block_bytes, "share": "none"},
        engine={
            "token_budget": 64,
            "max_sequences": 6,
            "kv_memory": 100 * layout.block_bytes + 6 * layout.state_bytes,
        },
    )
    shared = prompt_of(5, 260)
    prompts = [shared[: 100 + 10 * at] + prompt_of(50 + at, 30) for at in range(12)]
    with inside(config) as served:
        assert served.tokens(shared, 2, ignore_eos=True)
        # So many wait for the node that has it that others fetch it.
        check_all(served, models[family], [shared + prompt_of(40 + at, 40) for at in range(6)])
        check_all(served, models[family], prompts)
        served.wait_until(lambda: served.total("prefix_cache_hits_total") > 0, "hits")
        assert served.total("seal_mismatches_total") == 0
        served.wait_until(lambda: served.total("cache_memory_evictions_total") > 0, "evictions")
        served.wait_until(lambda: served.total("kv_bytes_fetched_total") > 0, "states cross between nodes")


def test_a_mixed_node_pre_empts_and_goes_on(models: dict[str, Path]) -> None:
    family = "kimi_linear"
    layout = layout_of(models[family])
    config = deployment(
        models[family],
        roles={"prefill": 0, "decode": 0, "mixed": 1},
        cache={"dram": 0},
        engine={
            "token_budget": 32,
            "max_sequences": 8,
            "kv_memory": 60 * layout.block_bytes + 8 * layout.state_bytes,
        },
    )
    prompts = [prompt_of(80 + at, 20 + at) for at in range(8)]
    with inside(config) as served:
        check_all(served, models[family], prompts, num_tokens=200)
        served.wait_until(lambda: served.total("num_preemptions_total") > 0, "pre-emptions")
