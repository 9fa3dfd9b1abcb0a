"""What a server says of its cache, beside a count of the copies that it has."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksStored
from isthmus.core.node.events import EngineBlocks
from isthmus.core.node.heard_blocks import HeardBlocks
from isthmus.core.types import NodeId

NODE = NodeId("s")
NAMES = st.lists(st.integers(0, 5), max_size=4)


@given(st.lists(st.one_of(st.tuples(NAMES, NAMES), st.none()), max_size=40))
def test_the_reports_are_the_blocks_of_which_there_is_a_copy(
    steps: list[tuple[list[int], list[int]] | None],
) -> None:
    """None: the server forgets all. Removals of what is not there change nothing."""
    heard, told, copies = HeardBlocks(NODE), set[int](), Counter[int]()
    for step in steps:
        stored, removed = step or ([], [])
        for report in heard.on(EngineBlocks(tuple(stored), tuple(removed), cleared=step is None)):
            names = set(report.names)
            assert len(names) == len(report.names), "each change is told once"
            if isinstance(report, BlocksStored):
                assert not names & told
                told |= names
            else:
                assert names <= told
                told -= names
        copies = Counter() if step is None else copies + Counter(stored)
        for name in removed:
            copies[name] = max(0, copies[name] - 1)
        heard.check()
        assert told == {name for name, count in copies.items() if count}
        assert heard.num_blocks == len(told)
    chain = [0, 1, 2, 3]
    assert heard.match(chain) == next((at for at in chain if at not in told), 4)
