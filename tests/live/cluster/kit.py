"""Clusters of emulated engines, whose tokens tell a wrong byte of KV: what their tests share.

`emulated` and `pooled` are settings for clusters of processes; `in_memory` is a head with nodes in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.cli.models import bytes_folder
from isthmus.config import Config
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.types import ModelCard, NodeId, Role
from isthmus.facts import NodeFacts, Sequences, rules_of
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of, recipe_of
from tests.memory_network import MemoryNetwork
from tests.served import Client
from tests.tape import MemoryTape

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


SMALL = Recipe("model", layout_of(16), 1000)


@asynccontextmanager
async def in_memory(
    roles: dict[str, Role],
    curve: Curve,
    *,
    network: MemoryNetwork | None = None,
    opener_of: Callable[[str], Any] = lambda node: None,
    **facts: Any,
) -> AsyncIterator[tuple[Head, dict[str, NodeProcess], MemoryTape]]:
    """A head, nodes of 64 blocks, and what the conductor hears."""
    network, tape, nodes = network or MemoryNetwork(), MemoryTape(), dict[str, NodeProcess]()
    card = ModelCard("model", 1000, 1000, created_s=0)
    head = Head(rules_of(Config()), card, silence_s=30, rejoin_s=30, recorder=tape, network=network)
    join = await head.open("127.0.0.1", 0)
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for name, role in roles.items():
            sequences = Sequences(4, 2, 4)
            node = NodeFacts(NodeId(name), role, curve, 64, 16, token_budget=64, sequences=sequences, **facts)
            engine = EmulatedEngine(SMALL, compile_cost(curve), 64, max_length=1000)
            options = NodeOptions(node, join, transfer_s=30)
            nodes[name] = NodeProcess(engine, options, Runtime(network), opener_of(name))
            group.create_task(nodes[name].run())
        await head.wait_for([NodeId(name) for name in roles])
        yield head, nodes, tape
        await head.close()
