"""What is looked at after each cluster inside a test is able to show what is wrong."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.core.conductor.index import PrefixIndex
from isthmus.live.engine.emulated import expected_tokens
from isthmus.live.kv.loans import Lease
from tests import inside as room
from tests.inside import Inside, inside
from tests.live.cluster.kit import BLOCK_BYTES, RECIPE, ask, pooled, prompt_of


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left stays."""
    monkeypatch.setattr(room, "IDLE_S", 0)


def until_left(served: Inside, what: str) -> None:
    """Nothing else keeps the cluster from being idle."""
    served.wait_until(lambda: all(what in each for each in served.call(served._left) or [""]), what)


def test_a_block_on_disk_that_is_believed_to_be_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixIndex, "demote", PrefixIndex.store)
    config = pooled(
        cache={"dram": 50 * BLOCK_BYTES, "ssd": 60 * BLOCK_BYTES, "folder": str(tmp_path / "blocks")}
    )
    draw = random.Random(7)
    prompts = [prompt_of(seed, draw.randrange(50, 500)) for seed in range(12)]
    with pytest.raises(AssertionError, match="in disk, and the conductor believes memory"):  # noqa: SIM117
        with inside(config) as served, ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda prompt: ask(served, prompt, 10), prompts))
            until_left(served, "in disk, and the conductor believes memory")


def test_a_lease_that_nobody_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "release", lambda self: None)
    with pytest.raises(AssertionError, match="slots pinned"), inside(pooled()) as served:
        first = prompt_of(1, 400)
        ask(served, first, 100)
        served.wait_until(
            lambda: served.gauge("cache_memory_blocks").get("decode-0", 0) >= 31, "the answer is kept"
        )
        ask(served, first + expected_tokens(RECIPE, first, 100) + prompt_of(2, 50))
        until_left(served, "slots pinned")
