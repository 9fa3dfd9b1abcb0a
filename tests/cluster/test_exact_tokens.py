"""A running cluster returns exactly the tokens that transformers' `generate` returns."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.models import MODEL_CASES, make_model, reference_tokens
from tests.served import Served, serve

NUM_TOKENS = 64
CHUNKS = (1, 7, 64, 512)
SERVED_CASES = [
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-mha",
    "llama-biases",
    "mistral-window",
    "qwen2-tied-shards",
    "qwen3",
    "qwen3-bias-yarn-window",
]
"""Between them: every family, RoPE variant, head and file arrangement. `--all-cases` runs the rest."""


def prompts_of(seed: int) -> list[list[int]]:
    """Sixteen prompts of 1 to 300 tokens; lengths around the block border of 16 are among them."""
    draw = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 5, 300, 48, 7, 200, 130]
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


def check(served: Served, folder: Path, prompts: list[list[int]]) -> None:
    """Alone first, then all at once (by then with cached prefixes)."""
    expected = [reference_tokens(folder, prompt, NUM_TOKENS) for prompt in prompts]
    for prompt, tokens in list(zip(prompts, expected, strict=True))[:5]:
        assert served.tokens(prompt, NUM_TOKENS) == tokens
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: served.tokens(prompt, NUM_TOKENS), prompts))
    assert found == expected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", MODEL_CASES if metafunc.config.getoption("--all-cases") else SERVED_CASES)


def test_every_family_and_variant(name: str, tmp_path: Path) -> None:
    """Prefill and decode in separate processes; the chunk sizes take turns over the cases."""
    index = list(MODEL_CASES).index(name)
    folder = tmp_path / "model"
    family, overrides = MODEL_CASES[name]
    make_model(folder, family, **overrides)
    chunk = CHUNKS[index % len(CHUNKS)]
    with serve(tmp_path, "--model", str(folder), "--token-budget", str(chunk)) as served:
        check(served, folder, prompts_of(index))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_prompt_of_3000_tokens_for_every_chunk_size(chunk: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(folder, "llama")
    draw = random.Random(chunk)
    prompt = [draw.randrange(256) for _ in range(3000)]
    with serve(tmp_path, "--model", str(folder), "--token-budget", str(chunk)) as served:
        assert served.tokens(prompt, NUM_TOKENS) == reference_tokens(folder, prompt, NUM_TOKENS)
        again = served.complete(prompt, NUM_TOKENS)
        assert (
            again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2992
        )  # all full blocks but the last token's
        assert again["choices"][0]["token_ids"] == reference_tokens(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    "roles", [("--mixed", "1"), ("--prefill", "2", "--decode", "2")], ids=["mixed", "2P2D"]
)
def test_other_shapes_of_cluster(roles: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(folder, "qwen3")
    with serve(tmp_path, "--model", str(folder), *roles) as served:
        check(served, folder, prompts_of(99))


@pytest.mark.parametrize("roles", [(), ("--mixed", "1")], ids=["1P1D", "mixed"])
def test_pre_emption_under_memory_pressure(roles: tuple[str, ...], tmp_path: Path) -> None:
    """KV memory for about a quarter of what sixteen answers need: some lose their blocks and resume."""
    folder = tmp_path / "model"
    make_model(folder, "llama")
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(20 + index)] for index in range(16)]
    expected = [reference_tokens(folder, prompt, 200) for prompt in prompts]
    with serve(tmp_path, "--model", str(folder), "--kv-memory", "768KiB", *roles) as served:
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(lambda prompt: served.tokens(prompt, 200), prompts)) == expected
        served.wait_until(lambda: sum(served.gauge("num_preemptions_total").values()) > 0, "a pre-emption")
