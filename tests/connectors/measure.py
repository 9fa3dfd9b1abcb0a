"""What loading saves and what saving costs, in a real vLLM server: `python -m tests.connectors.measure MODEL_FOLDER`.

Times to the first token of one prompt, computed and loaded, and times per token, with and without saving. Reads the
environment of `test_real_vllm`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from isthmus.live.servers.wire import Done, Load, Over, Save

from .adapter import Adapter
from .served import Server, server
from .test_real_vllm import BLOCK, params, until

LENGTH, ROUNDS, ANSWER, CLIENTS = 3000, 5, 256, 8


def first_token_ms(vllm: Server, prompt: list[int], ticket: dict[str, Any] | None) -> float:
    vllm.forget()
    begun = time.perf_counter()
    tokens = vllm.stream(prompt, ticket, n=2)
    next(tokens)
    took = 1e3 * (time.perf_counter() - begun)
    list(tokens)
    return took


def ms_per_token(vllm: Server, num_clients: int, *, is_saved: bool) -> float:
    """Of `num_clients` answers at once, after their first tokens: most steps decode only."""

    def ask(client: int) -> float:
        prompt = Random(time.monotonic_ns() + client).choices(range(1000, 40_000), k=40)
        tokens = vllm.stream(prompt, params(f"d{client}", 0) if is_saved else None, n=ANSWER)
        next(tokens)
        begun = time.perf_counter()
        count = sum(1 for _ in tokens)
        return 1e3 * (time.perf_counter() - begun) / count

    with ThreadPoolExecutor(num_clients) as clients:
        return median(clients.map(ask, range(num_clients)))


def show(what: str, times: list[float]) -> None:
    print(
        f"{what}: median {median(times):.2f} ms, all {', '.join(f'{one:.2f}' for one in sorted(times))}",
        flush=True,
    )


def main(model: Path) -> None:
    prompt = Random(1).choices(range(1000, 40_000), k=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with Adapter(place / "s") as adapter:
            arguments = ("--max-model-len", "4096")
            with server(model, adapter.path, place / "log", *arguments, dtype="bfloat16") as vllm:
                first_token_ms(vllm, prompt, None)
                computed, saved, loaded = [], [], []
                for _ in range(ROUNDS):  # in turn, so that a change of the machine's speed hits all alike
                    computed.append(first_token_ms(vllm, prompt, None))
                    adapter.messages.clear()
                    saved.append(first_token_ms(vllm, prompt, params("save", 0)))
                    until(lambda: adapter.of(Over))
                    loaded.append(first_token_ms(vllm, prompt, params("load", LENGTH // BLOCK)))
                    assert len(adapter.of(Load)) == len(adapter.of(Done)) == 1
                    assert len(adapter.blocks) == LENGTH // BLOCK and adapter.of(Save)
                show(f"first token of {LENGTH}, computed", computed)
                show(f"first token of {LENGTH}, computed and saved", saved)
                show(f"first token of {LENGTH}, loaded", loaded)
                for num_clients in (1, CLIENTS):
                    plain, kept = [], []
                    for _ in range(ROUNDS):
                        plain.append(ms_per_token(vllm, num_clients, is_saved=False))
                        kept.append(ms_per_token(vllm, num_clients, is_saved=True))
                    show(f"a token, {num_clients} at once", plain)
                    show(f"a token, {num_clients} at once, saved", kept)
        assert not adapter.errors


if __name__ == "__main__":
    main(Path(sys.argv[1]))
