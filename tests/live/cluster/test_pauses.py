"""What it costs that a process stands still for longer than others may be silent: time, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.core.conductor import NodeLeft
from isthmus.live.engine.emulated import expected_tokens
from tests.live.cluster.kit import RECIPE, STEADY
from tests.live.cluster.test_deaths import heard
from tests.served import serve, streamed

SILENCE_S = 3.0


def pause(name: str, head: int, nodes: list[int], pause_s: float) -> None:
    stopped = {"head": [head], "nodes": nodes, "all": [head, *nodes]}[name]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(pause_s)  # it is what is tested
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


CASES = [(who, pause_s) for who in ("head", "nodes", "all") for pause_s in (4.0, 5.0, 10.0)]


@pytest.mark.parametrize(
    ("who", "pause_s"),
    [pytest.param(*case, marks=() if case == ("all", 4.0) else pytest.mark.soak) for case in CASES],
)
def test_a_pause_costs_no_node_no_cache_and_no_answer(who: str, pause_s: float, tmp_path: Path) -> None:
    flight = tmp_path / "flight.jsonl"
    sections = {
        "roles": {"prefill": 2, "decode": 2},
        "engine": {"kind": "emulated", "cost": STEADY, "token_budget": 256},
        "cache": {"dram": "64MiB"},
        "limits": {"silence_s": SILENCE_S, "link_s": SILENCE_S},
    }
    prompts = [[at % 200 for at in range(seed, seed + 100 + 80 * seed)] for seed in range(16)]
    with serve(tmp_path, sections, "--record", str(flight)) as served, ThreadPoolExecutor(len(prompts)) as pool:
        nodes = list(served.children().values())
        known = [3 * at % 256 for at in range(320)]
        served.tokens(known, 1)
        served.wait_until(lambda: served.total("cache_memory_blocks") >= 20, "its blocks are in a cache")
        begun = [threading.Event() for _ in prompts]
        asked = [
            pool.submit(streamed, served, prompt, 150, event)
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        served.wait_until(lambda: sum(event.is_set() for event in begun) >= 4, "answers go on")
        pause(who, served.process.pid, nodes, pause_s)
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer.result() == expected_tokens(RECIPE, prompt, 150, stop_tokens=(257,))
        again = served.complete(known, 1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 300
        assert list(served.children().values()) == nodes
        assert heard(flight, NodeLeft) == 0
