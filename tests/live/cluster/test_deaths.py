"""What the death of a node costs: one attempt of each request that it takes part in, and no token."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from isthmus.core.conductor import NodeJoined, NodeLeft, RequestArrived, Route
from isthmus.core.types import NodeId, RequestId
from isthmus.live.engine.emulated import expected_tokens
from tests.live.cluster.kit import RECIPE, STEADY, emulated
from tests.served import Served, node_pid, serve, streamed
from tests.tape import Entry


def kill(served: Served, victim: str, flight: Path, times: int) -> None:
    """And waits until it has joined once more. The head hears of it before other nodes can say that they lost it."""
    processes, node = set(served.children().values()), victim.partition(".")[0]
    dead = node_pid(processes, victim)
    for other in processes - {dead}:
        os.kill(other, signal.SIGSTOP)
    os.kill(dead, signal.SIGKILL)
    served.wait_until(lambda: left(flight, node) == times, f"{victim} is missed")
    for other in processes - {dead}:
        os.kill(other, signal.SIGCONT)
    served.wait_until(lambda: joined(flight, node) == times + 1, f"{victim} comes back")


def entries(flight: Path) -> list[Entry]:
    return [
        msgspec.json.decode(line, type=Entry)
        for line in flight.read_bytes().splitlines(True)[1:]
        if line.endswith(b"\n")
    ]


def joined(flight: Path, node: str) -> int:
    return sum(isinstance(each.event, NodeJoined) and each.event.node == node for each in entries(flight))


def left(flight: Path, node: str) -> int:
    return sum(isinstance(each.event, NodeLeft) and each.event.node == node for each in entries(flight))


def heard(flight: Path, kind: type) -> int:
    return sum(isinstance(each.event, kind) for each in entries(flight))


def test_a_death_costs_one_attempt(tmp_path: Path) -> None:
    """kill -9 of a stage, twice, while some prompts wait, some are computed, some are handed over and some answers go
    on. Other deaths cost as much in virtual time (tests/parity)."""
    flight, victim = tmp_path / "flight.jsonl", "prefill-0.1"
    sections = emulated(STEADY, roles={"prefill": {"count": 2, "pipeline": 2}, "decode": 1})
    prompts = [[at % 200 for at in range(seed, seed + 100 + 80 * seed)] for seed in range(26)]
    late = prompts[24:]
    with serve(tmp_path, sections, "--record", str(flight)) as served, ThreadPoolExecutor(len(prompts)) as pool:
        begun = [threading.Event() for _ in prompts]

        def ask(prompt: list[int]) -> Future[list[int]]:
            return pool.submit(streamed, served, prompt, 150, begun[prompts.index(prompt)])

        def come(count: int) -> None:
            served.wait_until(lambda: heard(flight, RequestArrived) == count, f"{count} prompts came")

        asked = [ask(prompt) for prompt in prompts[:24]]
        come(24)
        for times in (1, 2):
            some = 4 * times
            served.wait_until(
                lambda some=some: sum(map(threading.Event.is_set, begun)) >= some, "answers go on"
            )
            # A machine that is slow to kill it, and not to answer, would find nothing left of it to lose.
            os.kill(node_pid(served.children().values(), victim), signal.SIGSTOP)
            asked.append(ask(late[times - 1]))
            come(24 + times)
            kill(served, victim, flight, times)
        for prompt, answer in zip(prompts, asked, strict=True):
            assert answer.result() == expected_tokens(RECIPE, prompt, 150, stop_tokens=(257,))
        log = entries(flight)
    routes: Counter[RequestId] = Counter()
    gone: list[NodeId] = []
    for entry in log:
        if isinstance(entry.event, NodeLeft):
            gone.append(entry.event.node)
        routes.update(action.request for action in entry.actions if isinstance(action, Route))
        # The head misses a group later than its leader does, and may route there once more.
        most = 1 + len(gone) * 2
        assert max(routes.values(), default=0) <= most, "a death cost more than one attempt"
    assert gone == ["prefill-0"] * 2
    assert len(routes) == len(prompts) and max(routes.values()) > 1
