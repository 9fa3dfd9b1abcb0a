"""A live cluster whose nodes die while others read their blocks: every answer is exact, and none is an error."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.live.cluster.kit import LONG, ask, pooled, prompt_of
from tests.served import Served, children_of, node_pid, serve


def computed_by(served: Served, prompt: list[int]) -> str:
    """Asks for a prompt that nobody knows; the prefill node that computed it."""
    before = served.gauge("tokens_computed_total")
    assert ask(served, prompt) == 0

    def gains() -> dict[str, float]:
        found = served.gauge("tokens_computed_total")
        return {node: found[node] - before[node] for node in ("prefill-0", "prefill-1")}

    served.wait_until(lambda: max(gains().values()) >= len(prompt), "gauges come")
    return max(gains(), key=lambda node: gains()[node])


def ask_followers(
    served: Served, pool: ThreadPoolExecutor, source: int, prefix: list[int], seed: int
) -> list[Future[int]]:
    """Prompts that begin like one that was computed, all of them asked for while the node that has it stands still: it
    has computed none of them when the last one comes."""
    os.kill(source, signal.SIGSTOP)
    answers = [pool.submit(ask, served, prefix + prompt_of(seed + number, 100)) for number in range(11)]
    served.wait_until_asked(len(answers), answers)
    return answers


@pytest.mark.parametrize("share", ["host", "none"], ids=["lent", "given"])
def test_a_node_that_dies_while_others_fetch_from_it_costs_time_only(share: str, tmp_path: Path) -> None:
    """First it stands still when it is asked for the blocks, and never answers; then it dies when it has answered. Some
    of the blocks may come from the decode node, which keeps those of prompts that ended there."""
    config = pooled(
        LONG,
        roles={"prefill": 2, "decode": 1},
        policy="mooncake",
        cache={"share": share},
    )
    moved = "kv_bytes_borrowed_total" if share == "host" else "kv_bytes_fetched_total"
    with serve(tmp_path, config) as served, ThreadPoolExecutor(12) as pool:

        def read(source: str, prefix: list[int], seed: int) -> list[Future[int]]:
            """Another node reads from the one that has the prefix."""
            before, pid = served.total(moved), pid_of(served, source)
            answers = ask_followers(served, pool, pid, prefix, seed)
            os.kill(pid, signal.SIGCONT)
            served.wait_until(lambda: served.total(moved) > before, "another node reads from it")
            return answers

        def die(source: str, answers: list[Future[int]], prompt: list[int]) -> None:
            os.kill(pid_of(served, source), signal.SIGKILL)
            for answer in answers:
                answer.result()  # exact, and status 200
            served.wait_until(lambda: len(served.gauge("cache_pinned_blocks")) == 3, "it is there again")
            ask(served, prompt)
            served.wait_until(lambda: served.total("cache_pinned_blocks") == 0, "nothing stays pinned")

        served.wait_until(lambda: len(served.gauge("tokens_computed_total")) == 3, "gauges come")
        first = prompt_of(3, 1600)
        source = computed_by(served, first)
        for answer in read(source, first, 100):  # there is a session now
            answer.result()
        second = next(
            prompt for seed in range(4, 20) if computed_by(served, prompt := prompt_of(seed, 1600)) == source
        )
        die(source, ask_followers(served, pool, pid_of(served, source), second, 200), first)
        third = prompt_of(20, 1600)
        source = computed_by(served, third)
        die(source, read(source, third, 300), third)


def pid_of(served: Served, node: str) -> int:
    return node_pid(children_of(served.process.pid), node)
