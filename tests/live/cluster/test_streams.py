from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.core.errors import UnavailableError
from isthmus.core.types import FinishReason, Generated, Job, RequestId, Sampling, TokenLogprobs
from isthmus.live.cluster.streams import AnswerStream

JOB = Job(RequestId("a"), (1, 2, 3), 100, Sampling())


def stream(cancel: object = None) -> AnswerStream:
    return AnswerStream(JOB, cancel or (lambda request: None))  # type: ignore[arg-type]


def answer(length: int) -> list[Generated]:
    finish = {length - 1: FinishReason.STOP}
    return [Generated(index, 100 + index, finish.get(index)) for index in range(length)]


async def everything(from_: AnswerStream) -> list[Generated]:
    """Reads to the end; nothing here waits longer than the test lets it."""
    async with asyncio.timeout(60):
        return [token async for batch in from_ for token in batch]


@given(st.integers(1, 12).flatmap(lambda length: st.permutations(range(length))))
def test_tokens_come_out_in_order_whatever_order_they_come_in(order: Sequence[int]) -> None:
    one, tokens = stream(), answer(len(order))
    over = [one.deliver(tokens[index]) for index in order]
    assert over == [False] * (len(order) - 1) + [True]
    assert asyncio.run(everything(one)) == tokens
    assert one.generated == tuple(token.token for token in tokens)


async def test_a_batch_is_never_empty_and_nothing_is_held_back() -> None:
    one, tokens = stream(), answer(4)
    batches = one.__aiter__()
    one.deliver(tokens[0])
    assert await anext(batches) == [tokens[0]]
    one.deliver(tokens[2])
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.deliver(tokens[1])
    assert await waiting == [tokens[1], tokens[2]]
    one.deliver(tokens[3])
    assert await anext(batches) == [tokens[3]]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


def test_a_new_attempt_goes_on_after_what_the_client_has() -> None:
    one, tokens = stream(), answer(5)
    one.deliver(tokens[0])
    one.deliver(tokens[1])
    one.deliver(tokens[3])  # 2 was lost with the node
    one.end_attempt()
    assert one.generated == (100, 101)
    again = [Generated(2, 7), Generated(3, 8), Generated(4, 9, FinishReason.LENGTH)]
    assert [one.deliver(token) for token in again] == [False, False, True]
    assert asyncio.run(everything(one)) == [*tokens[:2], *again]
    assert one.generated == (100, 101, 7, 8, 9)


SCORED = Job(RequestId("a"), (1, 2, 3, 4, 5), 100, Sampling(prompt_logprobs=0))


def scores(seed: int, first: int, stop: int) -> list[TokenLogprobs]:
    """Those of one attempt, from and to the token of these numbers."""
    return [TokenLogprobs(-seed - number / 8, (), 1) for number in range(first, stop)]


def scored(*told: tuple[int, list[TokenLogprobs]]) -> AnswerStream:
    made = AnswerStream(SCORED, lambda request: None)
    for each in told:
        made.score(*each)
    return made


def test_scores_of_the_prompt_come_once_and_whole_with_the_first_token() -> None:
    one, tokens = scored((0, scores(1, 0, 1)), (1, scores(1, 1, 4))), answer(3)
    for index in (1, 0, 0, 2):  # decode's token overtakes the first one, which comes twice
        one.deliver(tokens[index])
    found = asyncio.run(everything(one))
    assert found == [replace(tokens[0], prompt_logprobs=tuple(scores(1, 0, 4))), *tokens[1:]]


async def test_a_failure_is_raised_after_the_tokens_that_came() -> None:
    one = stream()
    one.deliver(answer(3)[0])
    one.fail(UnavailableError("node p1 is gone"))
    batches = one.__aiter__()
    assert await anext(batches) == answer(3)[:1]
    with pytest.raises(UnavailableError, match="node p1 is gone"):
        await anext(batches)
