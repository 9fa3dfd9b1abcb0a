"""`isthmus serve --engine emulated`: real processes and sockets, no torch, and tokens that tell wrong bytes."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus.cli.models import bytes_folder
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.inside import inside
from tests.live.cluster.kit import RECIPE
from tests.served import serve

EMULATED = ("--engine", "emulated", "--hardware", "h200")


def prompts_of(count: int) -> list[list[int]]:
    """Some share a prefix."""
    draw = random.Random(count)
    shared = [draw.randrange(256) for _ in range(100)]
    return [
        shared[: draw.choice([0, 50, 100])] + [draw.randrange(256) for _ in range(draw.randrange(1, 300))]
        for _ in range(count)
    ]


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_every_answer_is_exact(tmp_path: Path) -> None:
    prompts = prompts_of(12)
    expected = [expected_tokens(RECIPE, prompt, 30) for prompt in prompts]
    arguments = ("--prefill", "2", "--decode", "2", "--token-budget", "64", "--host", "0.0.0.0")
    with serve(tmp_path, None, *EMULATED, *arguments) as served:
        assert "can use this server: there are no API keys" in served.story(), "it is open to others"
        assert not any(map(has_torch, [served.process.pid, *served.children().values()]))
        with ThreadPoolExecutor(12) as pool:
            for _ in range(2):  # then with cached prefixes
                found = pool.map(lambda prompt: served.tokens(prompt, 30, ignore_eos=True), prompts)
                assert list(found) == expected
        served.wait_until(lambda: sum(served.gauge("prefix_cache_hits_total").values()) > 0, "a prefix hit")
        salted = served.tokens(prompts[0], 30, ignore_eos=True, cache_salt="other")
        assert salted == expected_tokens(RECIPE, prompts[0], 30, salt="other") != expected[0]


def test_a_model_folder_with_a_config_alone_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    engine = {"kind": "emulated", "hardware": "h200", "gpus": 8, "kv_memory": "20GiB"}
    with inside({"model": str(folder), "engine": engine}) as served:
        assert served.model == "llama-70b"
        assert served.gauge("kv_blocks") == {"prefill-0": 4096.0, "decode-0": 4096.0}
        recipe = recipe_of(folder, bytes_folder(), 16)
        assert served.tokens([1, 2, 3], 5, ignore_eos=True) == expected_tokens(recipe, [1, 2, 3], 5)
        answer = served.complete([1, 2, 3], 2, ignore_eos=True, logprobs=1)["choices"][0]
        assert answer["logprobs"]["token_logprobs"] == [0.0, 0.0]
        slow = {"model": served.model, "prompt": [1] * 3000, "max_tokens": 2}
        reply = served.http.post("/v1/completions", json=slow, headers={"x-isthmus-slo-ttft-ms": "1"})
        assert reply.status_code == 200, "nothing refuses here"
        assert "isthmus_requests_within_slo_total 2.0" in served.http.get("/metrics").text


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
