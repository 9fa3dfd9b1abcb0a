"""A running cluster returns exactly the tokens that transformers' `generate` returns.

Float arithmetic in one process or in several is the same.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isthmus.live.gateway.tokenizer import BYTE_OF_CHAR
from tests.gguf_files import CONTROL, NORMAL, TEMPLATE, vocabulary_keys, write_gguf
from tests.inside import inside
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact") / "llama"
    make_model(folder, "llama")
    return folder


def test_a_long_prompt_in_small_chunks(tmp_path: Path) -> None:
    make_model(llama := tmp_path / "llama", "llama")
    draw, length = random.Random(7), 1000
    prompt = [draw.randrange(256) for _ in range(length)]
    with inside(deployment(llama, 7)) as cluster:
        answer = cluster.tokens(prompt, NUM_TOKENS)
        again = cluster.complete(prompt, NUM_TOKENS)
        full = (length - 1) // 16 * 16  # all full blocks but the last token's
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == full
        assert again["choices"][0]["token_ids"] == answer and len(answer) == NUM_TOKENS
        check_greedy(llama, prompt, answer)


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
