"""What is believed of a plain server's cache, beside a cache of an LRU that is known exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksStored
from isthmus.core.node.plain_server import LEAST_BLOCKS, PlainServer
from isthmus.core.types import NodeId

NODE = NodeId("s")
CHAINS = [tuple(range(first * 1000, first * 1000 + 20)) for first in range(8)]
"""Prompts of eight conversations, in names."""


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20)), max_size=60))
def test_the_reports_are_the_belief(prompts: list[tuple[int, int]]) -> None:
    server, told = PlainServer(NODE, LEAST_BLOCKS), set[int]()
    for chain, length in prompts:
        names = CHAINS[chain][:length]
        for report in server.computed(names):
            (told.update if isinstance(report, BlocksStored) else told.difference_update)(report.names)
        assert server.match(names) == length, "what was computed last is cached"
        server.check()
    assert len(told) == server.num_blocks <= LEAST_BLOCKS
    assert all(
        server.match(chain) == next((at for at, n in enumerate(chain) if n not in told), 20) for chain in CHAINS
    )


def test_answers_correct_the_capacity() -> None:
    server = PlainServer(NODE, 1024)
    server.told(0.9, 0.8)
    assert server.capacity_blocks == 1024, "bytes are no tokens"
    for _ in range(100):
        server.told(0.9, 0.0)
    assert server.capacity_blocks == LEAST_BLOCKS
    for _ in range(100):
        server.told(0.0, 0.9)
    assert server.capacity_blocks == 1024, "no more than the server says that it has"
