"""What is handed over, token by token: nothing twice, nothing left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.node.letters import NONE, extent_of
from isthmus.core.types import NodeId

from .world import route_of


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 40), st.integers(0, 3))
def test_a_transfer_goes_on_at_the_block_of_the_first_token_that_is_missing(
    size: int, start: int, beyond: int, state_blocks: int
) -> None:
    """Between the last token and the state lies nothing: a state begins with a block."""
    num_tokens = start * size + beyond
    route = route_of("r", NodeId("p"), NodeId("d"), handover_start=start, codec="int8")
    extent = extent_of(route, num_tokens, size, state_blocks)
    prompt, states = range(start * size, num_tokens), range(extent.states, extent.stop)
    assert extent.start == prompt.start and extent.num_tokens == prompt.stop
    assert len(states) == state_blocks * size or not state_blocks
    assert extent.states % size == 0 and 0 <= extent.states - num_tokens < size
    for received in (*prompt, *(states if state_blocks else ())):
        assert extent.resumes(received) == received // size * size
    assert extent.resumes(num_tokens) == (extent.states if state_blocks else num_tokens // size * size)
    assert all(extent.codec_at(token) == "int8" for token in prompt)
    assert all(extent.codec_at(token) == NONE for token in states)
