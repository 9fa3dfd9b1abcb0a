"""Live pipeline groups: several processes, each with some layers, that prefill as one node; every token is checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.inside import inside
from tests.live.cluster.kit import CURVE, STEADY, ask, emulated, flip_bits, prompt_of
from tests.served import Client


def deployment(*, curve: dict[str, Any] = CURVE, **sections: Any) -> dict[str, Any]:
    """One group of emulated stages."""
    return emulated(curve, roles={"prefill": {"count": 2, "pipeline": 2}, "decode": 1}, **sections)


def alike(served: Client) -> bool:
    """All stages of the group keep as many blocks in each tier."""
    tiers = [served.gauge(f"cache_{tier}_blocks") for tier in ("memory", "disk")]
    return all(tier["prefill-0"] == tier["prefill-0.1"] for tier in tiers)


# What goes wrong.


def test_cancelled_prompts_leave_nothing_behind() -> None:
    with inside(deployment(cache={"dram": "64MiB"}, curve=STEADY)) as served:
        for seed in range(6):
            body = {"model": served.model, "prompt": prompt_of(seed, 3000), "max_tokens": 20}
            with served.held(), pytest.raises(httpx.ReadTimeout):
                served.http.post("/v1/completions", json=body, timeout=0.05 + 0.06 * seed)
        ask(served, prompt_of(0, 3000))


STORED = prompt_of(4, 1600)


def on_disk(home: Path) -> dict[str, str]:
    return {"dram": "64MiB", "ssd": "64MiB", "folder": str(home / "blocks")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a group left on its disks: the blocks of one prompt."""
    home = tmp_path_factory.mktemp("kept")
    with inside(deployment(cache=on_disk(home))) as served:
        assert ask(served, STORED) == 0
        served.wait_until(
            lambda: min(served.gauge("cache_disk_blocks")[f"prefill-0{part}"] for part in ("", ".1")) >= 100,
            "written behind",
        )
    return home / "blocks"


def lose_half(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]:
        os.truncate(path, len(path.read_bytes().rstrip(b"\0")) // 2)


@pytest.mark.parametrize(("stage", "harm"), [("prefill-0", lose_half), ("prefill-0.1", flip_bits)])
def test_damage_in_one_stage_costs_time_and_no_token(
    stage: str, harm: Callable[[Path], None], kept: Path, tmp_path: Path
) -> None:
    """A block that is missing in a later stage poisons what was begun with it; another attempt computes it."""
    shutil.copytree(kept, tmp_path / "blocks")
    harm(tmp_path / "blocks" / stage)
    with inside(deployment(cache=on_disk(tmp_path))) as served:
        assert ask(served, STORED) < 1599
        ask(served, STORED)
        assert ask(served, STORED) == 1599, "it was not stored again"
        served.wait_until(lambda: alike(served), "all stages keep the same blocks")
