"""Whatever a running cluster does with its KV, it returns exactly the tokens that transformers' `generate` returns."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.gateway.tokenizer import BYTE_OF_CHAR
from tests.gguf_files import CONTROL, NORMAL, TEMPLATE, vocabulary_keys, write_gguf
from tests.inside import Inside, inside
from tests.live.cluster.kit import prompt_of as prompt_of
from tests.live.engine.hybrids import FAMILIES, save_tiny
from tests.models import MODEL_CASES, check_greedy, make_model
from tests.served import Client

NUM_TOKENS = 64
CHUNKS = (1, 7, 64, 512)
SERVED_CASES = ["llama-rope-llama3", "mistral-window", "qwen3-bias-yarn-window"]
"""`test_model` of the engine tries every variant with every chunk size; here they are served."""


def prompts_of(seed: int) -> list[list[int]]:
    """Sixteen prompts of 1 to 300 tokens; lengths around the block border of 16 are among them."""
    draw = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 5, 300, 48, 7, 200, 130]
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def check(served: Client, folder: Path, prompts: list[list[int]]) -> None:
    """Alone first, then all at once (by then with cached prefixes)."""
    alone = [served.tokens(prompt, NUM_TOKENS) for prompt in prompts[:5]]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: served.tokens(prompt, NUM_TOKENS), prompts))
    assert found[:5] == alone
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == NUM_TOKENS
        check_greedy(folder, prompt, tokens)


def deployment(folder: Path, chunk: int = 512, *, kv_memory: str = "64MiB", **sections: Any) -> dict[str, Any]:
    engine = {"token_budget": chunk, "kv_memory": kv_memory}
    return {"model": str(folder), "engine": engine, "cache": {"dram": kv_memory}, **sections}


@pytest.mark.parametrize(
    "name", [pytest.param(case, marks=() if case in SERVED_CASES else pytest.mark.soak) for case in MODEL_CASES]
)
def test_every_family_and_variant(name: str, tmp_path: Path) -> None:
    """The chunk sizes take turns over the cases."""
    index = list(MODEL_CASES).index(name)
    folder = tmp_path / "model"
    family, overrides = MODEL_CASES[name]
    make_model(folder, family, **overrides)
    with inside(deployment(folder, CHUNKS[index % len(CHUNKS)])) as cluster:
        check(cluster, folder, prompts_of(index))


def test_a_long_prompt_in_small_chunks(model: Path) -> None:
    draw, length = random.Random(7), 1000
    prompt = [draw.randrange(256) for _ in range(length)]
    with inside(deployment(model, 7)) as cluster:
        answer = cluster.tokens(prompt, NUM_TOKENS)
        again = cluster.complete(prompt, NUM_TOKENS)
        full = (length - 1) // 16 * 16  # all full blocks but the last token's
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == full
        assert again["choices"][0]["token_ids"] == answer and len(answer) == NUM_TOKENS
        check_greedy(model, prompt, answer)


def test_a_gguf_file(tmp_path: Path) -> None:
    """The same tokens as of the folder that it was made of, and its own tokenizer and template."""
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    make_model(folder, "llama", num_key_value_heads=1, tie_word_embeddings=True)
    tokens = [*sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__), *map("<|{}|>".format, range(15)), "he"]
    kinds = [NORMAL] * 256 + [CONTROL] * 15 + [NORMAL]
    keys = {
        "merges": ["h e"],
        "pre": "gpt-2",
        "bos_token_id": 256,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    write_gguf(path, folder, metadata=vocabulary_keys("gpt2", tokens, kinds, **keys))
    with inside(deployment(path)) as cluster:
        check(cluster, folder, prompts_of(7))
        answer = cluster.complete("the", 12)["choices"][0]["token_ids"]
        check_greedy(folder, [256, ord("t"), tokens.index("he")], answer)


NUM_POOLED = 48
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
"""16 tokens of 3 layers, keys and values, 2 heads of 16 float32."""
SLOW = {"kv_token_bytes": 768, "num_layers": 3, "prefill_token_s": 1e-3, "decode_fixed_s": 1e-3}
"""What the conductor is told of the engine: so slow that moving KV always pays."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact-pool") / "model"
    make_model(folder, "llama")
    return folder


def pool_deployment(
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
        found = served.complete(self.tokens, NUM_POOLED, ignore_eos=True)
        answer = found["choices"][0]["token_ids"]
        assert len(answer) == NUM_POOLED
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
    config = pool_deployment(model, roles={"prefill": 1, "decode": 1}, ssd="64MiB", folder=str(folder))
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


RECURRENT = ("qwen3_next", "kimi_linear")
SIZE = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    return {family: save_tiny(family, folder / family) for family in FAMILIES}


def hybrid_deployment(model: Path, **settings: Any) -> dict[str, Any]:
    engine = {"cost": SLOW, **settings.pop("engine", {})}
    return {"model": str(model), "engine": engine, "policy": "mooncake", **settings}


def layout_of(model: Path) -> KVLayout:
    return Engine(model, EngineOptions(kv_bytes=1 << 24, max_sequences=2)).layout


def check_all(served: Inside, model: Path, prompts: list[list[int]], num_tokens: int = NUM_POOLED) -> None:
    """All at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        with served.held():
            answering = pool.map(lambda prompt: served.tokens(prompt, num_tokens, ignore_eos=True), prompts)
            served.wait_until_asked(len(prompts))
        answers = list(answering)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == num_tokens
        check_greedy(model, prompt, answer)


def prompts_from(seed: int, *lengths: int) -> list[list[int]]:
    return [prompt_of(seed + at, length) for at, length in enumerate(lengths)]


@pytest.mark.parametrize(("family", "cached"), [("qwen3_next", False), *[(each, True) for each in FAMILIES]])
def test_handed_over_in_chunks_and_again_from_the_cache(
    family: str, cached: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Prefixes are reused from the engine's own memory, or from the cache beside it."""
    cache = {"dram": "32MiB", "ssd": "32MiB", "folder": str(tmp_path / "blocks")} if cached else {"dram": 0}
    config = hybrid_deployment(models[family], cache=cache, engine={"token_budget": 50})
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
        check_all(served, models[family], prompts_from(20, 1, 15, 16, 17, 64, 130, 5, 48))
    if cached:
        with inside(config) as served:
            kept = (len(other.tokens) - NUM_POOLED - 1) // SIZE * SIZE
            served.wait_until(lambda: served.total("cache_disk_blocks") > 0, "blocks on the disk")
            prompt = other.tokens[:-NUM_POOLED]
            assert Chat(models[family], prompt).turn(served) == kept, "from the SSD after a restart"
