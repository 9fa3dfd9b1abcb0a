from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from isthmus.core.types import NS_PER_S
from isthmus.live.messenger.running import STEP_NS, TICK_S, RunningTimer, running_timeout
from tests.virtual import ManualLoop


def running(work: Callable[[ManualLoop], Coroutine[None, None, None]]) -> Callable[[], None]:
    """A test on a loop that tells its time."""

    def test() -> None:
        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, ManualLoop)
            runner.run(work(loop))

    return test


@running
async def test_a_timer_is_due_in_its_time(loop: ManualLoop) -> None:
    called: list[float] = []
    for delay_s in (0.01, TICK_S, 5.0, 5.1):
        RunningTimer(loop, delay_s, lambda: called.append(loop.time()))
    RunningTimer(loop, 5.0, lambda: called.append(-1)).cancel()
    await asyncio.sleep(10)
    assert called == [0.01, TICK_S, 5.0, 5.1]


@running
async def test_a_timer_waits_for_time_in_which_the_loop_ran(loop: ManualLoop) -> None:
    called: list[float] = []
    for delay_s in (0.3, 5.0):
        RunningTimer(loop, delay_s, lambda: called.append(loop.time()))
    await asyncio.sleep(0.26)
    loop.stand_still(60)
    await asyncio.sleep(0)
    assert not called
    await asyncio.sleep(10)
    first, second = called
    assert 60.26 + TICK_S <= first < 61
    assert 60 + 5.0 - STEP_NS / NS_PER_S <= second <= 60 + 5.0 + TICK_S


@running
async def test_a_wait_ends_in_its_time_and_no_earlier_because_the_loop_stood_still(loop: ManualLoop) -> None:
    with pytest.raises(TimeoutError):
        async with running_timeout(5.0):
            await asyncio.sleep(60)
    assert loop.time() == 5.0
    async with running_timeout(5.0):
        await asyncio.sleep(1.0)
        loop.stand_still(60)
        await asyncio.sleep(2.0)
    await asyncio.sleep(60)
