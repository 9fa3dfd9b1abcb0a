"""What is believed of a plain server's cache, beside a cache of an LRU that is known exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksStored
from isthmus.core.node.plain_server import LEAST_BLOCKS, Answers, PlainServer
from isthmus.core.scheduler import chains_of
from isthmus.core.types import NodeId, Tenant

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


def test_where_the_capacity_is_known_from() -> None:
    server, unsaid = PlainServer(NODE, 1024), PlainServer(NODE, 0)
    assert (server.capacity_from, unsaid.capacity_from) == ("told", "guessed")
    server.told(0.9, 0.0, doubt=0.95)
    assert server.capacity_from == "told", "so much of a prompt no server caches"
    server.told(0.9, 0.0)
    assert server.capacity_from == "learnt"
    unsaid.restore(unsaid.capacity_blocks, [])
    assert unsaid.capacity_from == "guessed"
    unsaid.restore(server.capacity_blocks, [])
    assert unsaid.capacity_from == "learnt", "by an earlier run"


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 20)), max_size=60))
def test_a_belief_is_made_anew_from_its_chains(prompts: list[tuple[int, int]]) -> None:
    """The next prompts find both alike: what is kept is the same, and what goes first nearly so."""
    server = PlainServer(NODE, LEAST_BLOCKS)
    for chain, length in prompts:
        server.computed(CHAINS[chain][:length])
    other = PlainServer(NODE, LEAST_BLOCKS)
    reports = other.restore(server.capacity_blocks, chains_of(server.entries()))
    assert all(isinstance(report, BlocksStored) for report in reports), "nothing is evicted on the way"
    other.check()
    assert [other.match(chain) for chain in CHAINS] == [server.match(chain) for chain in CHAINS]
    assert other.num_blocks == server.num_blocks
    gone = server.forget()
    assert server.num_blocks == 0 and sum(len(report.names) for report in gone) == other.num_blocks


def test_chains_of_tenants_are_kept_without_their_shares() -> None:
    server = PlainServer(NODE, 1024)
    for number, name in enumerate(("a", "b", "a")):
        server.computed(CHAINS[number], Tenant(name, 1.0))
    assert sorted(chains_of(server.entries())) == sorted(CHAINS[:3])


def test_an_answer_lies_behind_its_prompt_where_it_was_generated() -> None:
    answers, one, other = Answers(), NodeId("one"), NodeId("other")
    names = CHAINS[0][:9]
    answers.ended(one, names[:3], 2)
    answers.ended(other, names[:3], 1)
    answers.ended(other, names[:5], 1)
    answers.ended(one, (), 1)
    assert answers.behind(names[:2]) == (0, {})
    assert answers.behind(names[:4]) == (3, {one: 2, other: 1})
    assert answers.behind(names) == (5, {other: 1})
