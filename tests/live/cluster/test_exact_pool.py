"""Whatever tier or node a cached prefix comes from, the tokens are those of transformers' `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.inside import inside
from tests.live.cluster.kit import prompt_of as prompt_of
from tests.models import check_greedy, make_model
from tests.served import Client

NUM_TOKENS = 48
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
"""16 tokens of 3 layers, keys and values, 2 heads of 16 float32."""
SLOW = {"kv_token_bytes": 768, "num_layers": 3, "prefill_token_s": 1e-3, "decode_fixed_s": 1e-3}
"""What the conductor is told of the engine: so slow that moving KV always pays."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact-pool") / "model"
    make_model(folder, "llama")
    return folder


def deployment(
    model: Path, /, *, roles: dict[str, int], kv_memory: str | int = "64MiB", **cache: Any
) -> dict[str, Any]:
    """Torch nodes; a cache of 1,000 blocks each unless told otherwise."""
    return {
        "model": str(model),
        "roles": roles,
        "engine": {"cost": SLOW, "token_budget": 256, "kv_memory": kv_memory},
        "policy": "mooncake",
        "cache": {"dram": 1000 * BLOCK_BYTES, **cache},
    }


class Chat:
    """A conversation that grows by its answers and new questions; every answer is compared with transformers'."""

    def __init__(self, model: Path, prompt: list[int]) -> None:
        self._model, self.tokens = model, prompt

    def turn(self, served: Client, question: list[int] | None = None) -> int:
        """Asks, after adding a question; returns how many tokens of the prompt were cached."""
        self.tokens = self.tokens + (question or [])
        found = served.complete(self.tokens, NUM_TOKENS, ignore_eos=True)
        answer = found["choices"][0]["token_ids"]
        assert len(answer) == NUM_TOKENS
        check_greedy(self._model, self.tokens, answer)
        self.tokens = self.tokens + answer
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def num_kept(self) -> int:
        """Tokens in full blocks of which there is KV: the last token's was never computed."""
        return (len(self.tokens) - 1) // 16 * 16


def await_blocks(served: Client, node: str, metric: str, tokens: int) -> None:
    served.wait_until(
        lambda: served.gauge(metric).get(node, 0) >= tokens // 16, f"{metric} of {node}: {tokens} tokens"
    )


def test_dram_the_next_turn_and_ssd_after_a_restart(model: Path, tmp_path: Path) -> None:
    """Prefixes on the prefill node's DRAM, in a decode node's lent DRAM, on either node's SSD."""
    folder = tmp_path / "blocks"
    config = deployment(model, roles={"prefill": 1, "decode": 1}, ssd="64MiB", folder=str(folder))
    shared = prompt_of(1, 600)
    chat = Chat(model, shared)
    with inside(config) as served:
        assert chat.turn(served) == 0
        assert Chat(model, shared[:333] + prompt_of(2, 70)).turn(served) == 320, "the prefill node's own DRAM"
        burst = [Chat(model, prompt_of(10, 600) + prompt_of(seed, 30)) for seed in range(11, 15)]
        with ThreadPoolExecutor(len(burst)) as pool:
            cached = sorted(pool.map(lambda each: each.turn(served), burst))
        assert cached == [0, 592, 592, 592], "the first computes it for all"
        await_blocks(served, "decode-0", "cache_memory_blocks", chat.num_kept)
        kept = chat.num_kept
        assert chat.turn(served, prompt_of(3, 40)) == kept, "generated blocks, where the decode node has them"
        served.wait_until(lambda: served.total("kv_bytes_borrowed_total") > 0, "lent, not sent")
        assert served.total("kv_bytes_fetched_total") == 0
        await_blocks(served, "decode-0", "cache_disk_blocks", chat.num_kept)
        await_blocks(served, "prefill-0", "cache_disk_blocks", kept)
    with inside(config) as served:
        await_blocks(served, "decode-0", "cache_disk_blocks", chat.num_kept)
        assert served.total("cache_memory_blocks") == 0
        assert Chat(model, shared[:500]).turn(served) == 496, "the prefill node's own SSD"
        kept = chat.num_kept
        assert chat.turn(served, prompt_of(4, 25)) == kept, (
            "the newest answer is on the decode node's SSD alone"
        )
        assert served.total("cache_seal_mismatches_total") == 0
