"""Models with recurrent layers and with latent attention: chunks, cached prefixes, hand-overs, pre-emption and tiers
change no token of what transformers' `generate` returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.blocks import KVLayout
from isthmus.engine.engine import Engine, EngineOptions
from tests.cluster.test_exact_pool import NUM_TOKENS, SLOW, Chat, prompt_of, total
from tests.engine.hybrids import FAMILIES, save_tiny
from tests.models import reference_tokens
from tests.served import Served, serve

RECURRENT = ("qwen3_next", "kimi_linear")
SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return {family: save_tiny(family, folder / family) for family in FAMILIES}


def deployment(home: Path, model: Path, **settings: Any) -> str:
    path = home / "isthmus.yaml"
    engine = {"cost": SLOW, **settings.pop("engine", {})}
    path.write_text(json.dumps({"model": str(model), "engine": engine, "policy": "mooncake", **settings}))
    return str(path)


def layout_of(model: Path) -> KVLayout:
    return Engine(model, EngineOptions(kv_bytes=1 << 24, max_sequences=2)).layout


def check_all(served: Served, model: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> None:
    expected = [reference_tokens(model, prompt, num_tokens) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert (
            list(pool.map(lambda prompt: served.tokens(prompt, num_tokens, ignore_eos=True), prompts))
            == expected
        )


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    return [prompt_of(seed + at, length) for at, length in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cached", [False, True], ids=["memory", "cache"])
def test_handed_over_in_chunks_and_again_from_the_cache(
    family: str, cached: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Prefixes are reused from the engine's own memory, or from the cache beside it."""
    cache = {"dram": "32MiB", "ssd": "32MiB", "folder": str(tmp_path / "blocks")} if cached else {"dram": 0}
    config = deployment(tmp_path, models[family], cache=cache, engine={"token_budget": 50})
    chat = Chat(models[family], prompt_of(1, 333))
    with serve(tmp_path, "--config", config) as served:
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
        idle = lambda: total(served, "kv_blocks_transfer") == 0 == total(served, "node_requests_running")  # noqa: E731
        served.wait_until(idle, "transfer-cache blocks are free when the transfers are over")
    if cached:
        with serve(tmp_path, "--config", config) as served:
            kept = (len(other.tokens) - NUM_TOKENS - 1) // SIZE * SIZE
            served.wait_until(lambda: total(served, "cache_disk_blocks") > 0, "blocks on the disk")
            prompt = other.tokens[:-NUM_TOKENS]
            assert Chat(models[family], prompt).turn(served) == kept, "from the SSD after a restart"


@pytest.mark.parametrize("family", RECURRENT)
def test_two_of_each_with_little_memory(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Blocks are evicted, and prefixes fetched between nodes with their states."""
    layout = layout_of(models[family])
    config = deployment(
        tmp_path,
        models[family],
        roles={"prefill": 2, "decode": 2},
        cache={"dram": 48 * layout.block_bytes, "share": "none"},
        engine={"token_budget": 64, "max_sequences": 6},
    )
    memory = 100 * layout.block_bytes + 6 * layout.state_bytes
    shared = prompt_of(5, 260)
    prompts = [shared[: 100 + 10 * at] + prompt_of(50 + at, 30) for at in range(12)]
    with serve(tmp_path, "--config", config, "--kv-memory", str(memory)) as served:
        assert served.tokens(shared, 2, ignore_eos=True)
        check_all(served, models[family], [shared + prompt_of(40 + at, 40) for at in range(6)])
        check_all(served, models[family], prompts)
        served.wait_until(lambda: total(served, "prefix_cache_hits_total") > 0, "hits")
        assert total(served, "seal_mismatches_total") == 0
        served.wait_until(lambda: total(served, "kv_bytes_fetched_total") > 0, "states cross between nodes")
        served.wait_until(lambda: total(served, "cache_memory_evictions_total") > 0, "evictions")


@pytest.mark.parametrize("family", RECURRENT)
def test_a_mixed_node_pre_empts_and_goes_on(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    layout = layout_of(models[family])
    config = deployment(
        tmp_path,
        models[family],
        roles={"prefill": 0, "decode": 0, "mixed": 1},
        cache={"dram": 0},
        engine={"token_budget": 32, "max_sequences": 8},
    )
    memory = 60 * layout.block_bytes + 8 * layout.state_bytes
    prompts = [prompt_of(80 + at, 20 + at) for at in range(8)]
    with serve(tmp_path, "--config", config, "--kv-memory", str(memory)) as served:
        check_all(served, models[family], prompts, num_tokens=200)
        served.wait_until(lambda: total(served, "num_preemptions_total") > 0, "pre-emptions")
