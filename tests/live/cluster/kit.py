"""Clusters of emulated engines, whose tokens tell a wrong byte of KV: what their tests share.

`emulated` and `pooled` are settings for clusters.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.cli.models import bytes_folder
from isthmus.live.engine.emulated import Recipe, expected_tokens, recipe_of
from tests.served import Client

RECIPE = recipe_of(bytes_folder(), bytes_folder(), 16)
CURVE: dict[str, Any] = {
    "kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.001
}  # fmt: skip
LONG = CURVE | {"prefill_token_s": 4e-4}
"""Computing 1,600 tokens takes 0.64 s, fetching them next to nothing: fetches are what the conductor orders."""
STEADY = CURVE | {"prefill_token_s": 1e-4, "decode_fixed_s": 0.004}
"""Prompts and answers both take a while."""
BLOCK_BYTES = 16 * 2048


def emulated(curve: dict[str, Any] = CURVE, **sections: Any) -> dict[str, Any]:
    """Settings; of the engine, too, where they are given."""
    engine = {"kind": "emulated", "cost": curve, "token_budget": 256} | sections.pop("engine", {})
    return {"engine": engine, **sections}


def pooled(curve: dict[str, Any] = CURVE, **sections: Any) -> dict[str, Any]:
    """With a cache of 1,000 blocks."""
    return emulated(curve, cache={"dram": 1000 * BLOCK_BYTES, **sections.pop("cache", {})}, **sections)


def written(folder: Path, settings: dict[str, Any]) -> str:
    """As a configuration file."""
    path = folder / "isthmus.yaml"
    path.write_text(json.dumps(settings))
    return str(path)


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def ask(served: Client, prompt: list[int], count: int = 20, *, recipe: Recipe = RECIPE, **fields: Any) -> int:
    """Checks an answer; returns how many of its prompt's tokens were cached."""
    found = served.complete(prompt, count, ignore_eos=True, **fields)
    assert found["choices"][0]["token_ids"] == expected_tokens(recipe, prompt, count)
    return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])


def flip_bits(folder: Path, count: int = 40) -> None:
    """So many in what was written to each large file."""
    damage = random.Random(6)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > 4096:
            data = np.fromfile(path, np.uint8)
            for at in damage.sample(np.flatnonzero(data).tolist(), count):
                data[at] ^= 1 << damage.randrange(8)
            data.tofile(path)
