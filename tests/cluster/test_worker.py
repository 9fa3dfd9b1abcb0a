"""Both workers drive a stepper alike: what comes in an iteration is taken in at its end, before `Stepped`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from isthmus.cluster.messages import Begin
from isthmus.cluster.stepper import Stepper
from isthmus.cluster.virtual import LoopWorker, ManualLoop
from isthmus.cluster.worker import Requests, ThreadWorker
from isthmus.cost import Curve, compile_cost
from isthmus.engine.emulated import EmulatedEngine, Recipe, layout_of
from isthmus.engine.interface import Row, Sampled
from isthmus.scheduler import Limits, Missing, Scheduler
from isthmus.types import RequestId, Role, Sampling

CURVE = Curve(kv_token_bytes=1, num_layers=2, prefill_token_s=1e-3, decode_fixed_s=1e-3)


class Watched(Scheduler):
    """Keeps the kinds of the events it is told, and with which deadline a request arrived."""

    def __init__(self) -> None:
        super().__init__(Limits(num_blocks=64, block_size=4, token_budget=8))
        self.told: list[str] = []
        self.deadlines: list[int] = []

    def on(self, event: Any, now: int = 0) -> list[Any]:
        self.told.append(type(event).__name__)
        self.deadlines += [event.deadline_ns] if hasattr(event, "deadline_ns") else []
        return super().on(event, now)


class Interrupted(EmulatedEngine):
    """In iterations of these numbers, counted from 0, something else happens as well."""

    def __init__(self) -> None:
        super().__init__(Recipe("model", layout_of(4), 1000), compile_cost(CURVE), 64, max_length=100)
        self.meanwhile: dict[int, Callable[[], None]] = {}
        self._count = -1

    def step(self, batch: Any, rows: Sequence[Row], *hooks: Any) -> Sampled:
        self._count += 1
        self.meanwhile.get(self._count, int)()
        return super().step(batch, rows, *hooks)


class Ended:
    """A listener that waits for the ends of requests."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.all = threading.Event()

    def finished(self, key: RequestId) -> None:
        self._left -= 1
        if self._left == 0:
            self.all.set()

    def died(self, error: BaseException) -> None:
        raise error

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def begin(name: str, num_tokens: int, stop_length: int, **fields: Any) -> Begin:
    prompt = tuple(range(num_tokens))
    return Begin(RequestId(name), 1, Role.MIXED, prompt, num_tokens, stop_length, Sampling(), (), **fields)


def driven_by_thread(requests_of: Callable[[Interrupted, Requests], None]) -> Watched:
    scheduler, engine, ended = Watched(), Interrupted(), Ended(2)
    stepper = Stepper(engine, scheduler, ended, lambda: 1000)  # type: ignore[arg-type]
    worker = ThreadWorker(stepper)

    async def work() -> None:
        requests_of(engine, Requests(stepper, worker))
        worker.start()
        assert await asyncio.to_thread(ended.all.wait, 30)
        worker.stop()

    asyncio.run(work())
    return scheduler


def driven_by_loop(requests_of: Callable[[Interrupted, Requests], None]) -> Watched:
    scheduler, engine, ended = Watched(), Interrupted(), Ended(2)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        stepper = Stepper(engine, scheduler, ended, lambda: 1000)  # type: ignore[arg-type]
        worker = LoopWorker(stepper, loop)
        requests_of(engine, Requests(stepper, worker))
        worker.start()
        while not ended.all.is_set():
            await asyncio.sleep(1e-3)
        worker.stop()

    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        runner.run(work())
    return scheduler


@pytest.mark.parametrize("drive", [driven_by_thread, driven_by_loop])
def test_what_comes_during_an_iteration_is_taken_in_at_its_end(drive: Callable[..., Watched]) -> None:
    """The prompt of 10 tokens takes two iterations, then the answer is a run of many, which the second request
    breaks off after its first iteration (the third in all)."""

    def requests_of(engine: Interrupted, requests: Requests) -> None:
        requests.begin(begin("a", 10, 15))
        engine.meanwhile[2] = lambda: requests.begin(begin("b", 3, 5))

    told = drive(requests_of).told
    assert told[:5] == ["Arrived", "Stepped", "Stepped", "Arrived", "Stepped"]
    assert told.count("Stepped") == len(told) - 2


@pytest.mark.parametrize("drive", [driven_by_thread, driven_by_loop])
def test_a_promise_is_turned_into_this_clocks_time(drive: Callable[..., Watched]) -> None:
    def requests_of(engine: Interrupted, requests: Requests) -> None:
        for name, budget_ns in (("a", 500), ("b", -5000), ("c", None)):
            requests.begin(begin(name, 3, 4, budget_ns=budget_ns))

    assert drive(requests_of).deadlines[:3] == [1500, 1, 0]


def test_a_load_that_fell_short_has_ended_when_its_state_is_given_back() -> None:
    """The scheduler gives the blocks of the state to somebody else at once."""
    done: list[str] = []

    class Ending:
        def cancel(self) -> None:
            done.append("ended")

    class Told(Watched):
        def on(self, event: Any, now: int = 0) -> list[Any]:
            done.append(type(event).__name__)
            return []

    recipe = Recipe("model", layout_of(4, state_tokens=8), 1000)
    engine = EmulatedEngine(recipe, compile_cost(CURVE), 64, max_length=100)
    stepper = Stepper(engine, Told(), Ended(1), lambda: 0)  # type: ignore[arg-type]
    stepper.begin(begin("a", 20, 30), 0)
    stepper._live[begin("a", 20, 30).key].load = Ending()  # type: ignore[assignment]
    stepper._shorten(Missing(begin("a", 20, 30).key, 3))
    assert done == ["Arrived", "ended", "Missing"]
