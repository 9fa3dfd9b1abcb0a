"""The scheduler side's bookkeeping: names, and plans in a small vLLM that preempts, shares, loads and finishes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus_vllm.plans import (
    FORGET_S,
    Chain,
    LoadOrder,
    Planner,
    Report,
    SaveOrder,
    Scheduled,
    Ticket,
    ticket_of,
)

N = 4
KEY = bytes(32)
FIELD = {"v": 1, "key": "k", "blocks": 3, "namer": KEY.hex()}


def names(tokens: list[int]) -> tuple[bytes, ...]:
    return Chain(KEY, N).names(tokens, 0, len(tokens) // N)


def planner(blocks: int = 0, tokens: list[int] | None = None) -> tuple[Planner, Counter[int]]:
    """One that knows request "r", and what it has pinned."""
    pins: Counter[int] = Counter()
    made = Planner(N, pins.update, pins.subtract)
    made.begin("r", Ticket(1, "k", blocks, KEY.hex()), KEY, list(range(10)) if tokens is None else tokens)
    return made, pins


def table(request: str) -> list[int]:
    return [11, 12, 13, 14]


def test_a_ticket_is_read() -> None:
    assert ticket_of({"isthmus": FIELD}) == (Ticket(1, "k", 3, KEY.hex()), KEY)
    assert ticket_of(None) is ticket_of({}) is ticket_of({"other": 1}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": 2}, {"v": "1"}, {"key": ""}, {"key": 7}, {"blocks": -1}, {"blocks": 1.5}, {"blocks": True},
        {"namer": "00"}, {"namer": "zz" * 32}, {"namer": None}, {"more": 1},
    ],
)  # fmt: skip
def test_an_ill_formed_ticket_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ticket_of({"isthmus": FIELD | wrong})
    with pytest.raises(ValueError):
        ticket_of({"isthmus": {field: FIELD[field] for field in FIELD if field not in wrong} | {"x": 1}})
    with pytest.raises(ValueError):
        ticket_of({"isthmus": None})


def test_a_lost_connection_is_believed_for_a_while() -> None:
    made, _ = planner(1)
    made.reported(Report(connected=False), now=5.0)
    assert made.matched("r", 0, 5.0) == 0
    assert made.matched("r", 0, 5.0 + FORGET_S) == N
    made.reported(Report(connected=False), now=7.0)
    made.reported(Report(connected=True), now=7.1)
    assert made.matched("r", 0, 7.1) == N


def test_a_request_whose_saving_has_ended_is_not_saved_on() -> None:
    made, pins = planner()
    (save,) = made.step([Scheduled("r", 4, 1)], table).saves
    made.reported(Report((save.job,), ("r", "unknown")), now=0.0)
    assert not made.step([Scheduled("r", 8, 2)], table).saves
    assert not pins.total()


def test_an_end_aborts_the_load_and_is_told_once() -> None:
    made, _ = planner(2)
    made.allocated("r", made.matched("r", 0, 0.0), table("r"))
    (load,) = made.step([], table).loads
    assert not made.has_work
    made.finished("r")
    made.finished("r")
    assert made.has_work
    plan = made.step([], table)
    assert (plan.aborts, plan.over) == ((load.load,), (("r", "k"),))
    made.loaded("r", whole=False)
    assert made.step([], table) == type(plan)()
    assert not made.has_work


class Request:
    def __init__(self, name: str, tokens: list[int], blocks: int) -> None:
        self.name = name
        self.tokens = tokens
        self.promised = blocks
        self.computed = 0
        self.table: list[int] = []
        self.is_loading = False
        self.is_over = False
        self.next_saved = blocks


class SmallVllm(RuleBasedStateMachine):
    """Blocks count their references, and hold a name once they are full. Prompts are of few kinds, so that some share.

    Blocks without references are reused at once, whatever the planner thinks of them, and hold nothing then.
    """

    NUM_BLOCKS = 14

    @initialize()
    def begin(self) -> None:
        self.refs = [0] * self.NUM_BLOCKS
        self.content: list[bytes | None] = [None] * self.NUM_BLOCKS
        self.planner = Planner(N, self.touch, self.free)
        self.requests: dict[str, Request] = {}
        self.jobs: list[SaveOrder] = []
        self.loads: dict[int, LoadOrder] = {}
        self.given_up: list[int] = []
        """Loads of requests that ended meanwhile, since the last step; some may be through by the next."""
        self.over: Counter[str] = Counter()
        self.num_arrived = 0

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            assert self.refs[block] or self.content[block] is not None
            self.refs[block] += 1

    def free(self, blocks: Any) -> None:
        for block in blocks:
            assert self.refs[block] > 0
            self.refs[block] -= 1

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Blocks for so many tokens; those in nobody's use may hold something still, which is overwritten."""
        more = -(-num_tokens // N) - len(request.table)
        unused = [block for block in range(self.NUM_BLOCKS) if not self.refs[block]]
        if more > len(unused):
            return False
        for block in unused[: max(more, 0)]:
            self.refs[block], self.content[block] = 1, None
            request.table.append(block)
        return True

    def step(self, scheduled: list[Request]) -> None:
        facts = [Scheduled(request.name, request.computed, len(request.tokens) // N) for request in scheduled]
        plan = self.planner.step(facts, lambda name: self.requests[name].table)
        for request in scheduled:  # the forward
            for index, name in enumerate(names(request.tokens)):
                if (index + 1) * N <= request.computed:
                    self.content[request.table[index]] = name
        for save in plan.saves:
            request = self.requests[save.request]
            assert (
                save.first == request.next_saved
                and save.names == names(request.tokens)[save.first :][: len(save.names)]
            )
            request.next_saved += len(save.names)
        self.jobs += plan.saves
        self.loads |= {load.load: load for load in plan.loads}
        assert Counter(plan.aborts) == Counter(self.given_up)
        self.given_up = []
        self.over.update(name for name, _ in plan.over)

    def pick(self, data: st.DataObject, *, is_loading: bool = False) -> Request | None:
        some = [one for one in self.requests.values() if one.is_loading == is_loading and not one.is_over]
        return data.draw(st.sampled_from(some)) if some else None

    @rule(kind=st.integers(0, 1), length=st.integers(1, 14), blocks=st.integers(0, 3))
    def arrive(self, kind: int, length: int, blocks: int) -> None:
        self.num_arrived += 1
        request = Request(f"r{self.num_arrived}", [kind * 100 + at for at in range(length)], blocks)
        self.requests[request.name] = request
        self.planner.begin(request.name, Ticket(1, request.name, blocks, KEY.hex()), KEY, request.tokens)

    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def schedule(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.pick(data)
        if request is None or (not request.computed and self.admit(request)):
            return
        num_tokens = min(num_tokens, len(request.tokens) - request.computed)
        if not self.allocate(request, request.computed + num_tokens):
            return
        request.computed += num_tokens
        self.step([request])
        if request.computed == len(request.tokens):
            request.tokens.append(data.draw(st.integers(0, 1)))

    def admit(self, request: Request) -> bool:
        """Gives it what others have computed, and starts its load. Whether it must wait."""
        local = 0
        for name in names(request.tokens)[: (len(request.tokens) - 1) // N]:
            if name not in self.content:
                break
            request.table.append(self.content.index(name))
            self.touch(request.table[-1:])
            local += N
        num_tokens = self.planner.matched(request.name, local, 0.0)
        if not self.allocate(request, local + num_tokens):
            self.free(request.table)
            request.table = []
            return True
        self.planner.allocated(request.name, num_tokens, request.table)
        request.computed = min(local + num_tokens, len(request.tokens) - 1)
        if not num_tokens:
            return False
        request.is_loading = True
        self.step([])
        return True

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if (request := self.pick(data)) is not None:
            self.free(request.table)
            request.table, request.computed = [], 0

    @rule(data=st.data(), is_loading=st.booleans())
    def finish(self, data: st.DataObject, is_loading: bool) -> None:
        if (request := self.pick(data, is_loading=is_loading)) is not None:
            self.end(request)

    def end(self, request: Request) -> None:
        request.is_over = True
        self.planner.finished(request.name)
        if request.is_loading:
            self.given_up += [load.load for load in self.loads.values() if load.request == request.name]
        else:
            self.free(request.table)

    @precondition(lambda self: self.jobs)
    @rule(is_whole=st.booleans())
    def copy(self, is_whole: bool) -> None:
        job = self.jobs.pop(0)
        assert [self.content[block] for block in job.blocks] == list(job.names)
        assert all(self.refs[block] for block in job.blocks)
        self.planner.reported(Report((job.job,), () if is_whole else (job.request,)), 0.0)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_whole=st.booleans())
    def end_load(self, data: st.DataObject, is_whole: bool) -> None:
        load = self.loads.pop(data.draw(st.sampled_from(sorted(self.loads))))
        request = self.requests[load.request]
        assert request.is_loading and all(self.refs[block] for block in load.blocks)
        request.is_loading = False
        for block, name in zip(load.blocks, load.names, strict=True):
            assert self.content[block] is None
            self.content[block] = name if is_whole else None
        self.planner.loaded(request.name, whole=is_whole)
        if not is_whole:
            request.next_saved, request.computed = 0, 0
        if request.is_over or not is_whole:
            self.free(request.table)
            request.table = []

    @rule()
    def idle(self) -> None:
        self.step([])

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "planner"):
            self.planner.check()

    def teardown(self) -> None:
        if not hasattr(self, "planner"):
            return
        for request in self.requests.values():
            if not request.is_over:
                self.end(request)
        self.step([])
        for load in list(self.loads.values()):
            self.free(self.requests[load.request].table)
            self.planner.loaded(load.request, whole=False)
        while self.jobs:
            self.copy(True)
        assert not any(self.refs) and not self.planner.has_work
        assert self.over == Counter(list(self.requests))


TestSmallVllm = SmallVllm.TestCase
TestSmallVllm.settings = settings(settings.default, stateful_step_count=60)


LAYOUT = KVLayout(dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
NAMER = BlockNamer(revision="r1", layout=LAYOUT, salt="tenant")
NAMER_KEY = NAMER.key


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(0, 10), max_size=4))
def test_names_are_those_of_isthmus(tokens: list[int], stops: list[int]) -> None:
    chain, end = Chain(NAMER_KEY, 4), len(tokens) // 4
    for stop in stops:  # asked in pieces, in any order
        chain.names(tokens, 0, min(stop, end))
    assert list(chain.names(tokens, 0, end)) == NAMER.names(tokens)
    assert chain.parent(0) is None
    assert [chain.parent(first) for first in range(1, end + 1)] == NAMER.names(tokens)


def test_names_go_on_as_tokens_come() -> None:
    chain, tokens = Chain(NAMER_KEY, 4), list(range(5))
    (first,) = chain.names(tokens, 0, 1)
    tokens += range(5, 8)
    assert chain.names(tokens, 1, 2) == (NAMER.names(tokens)[1],)
    assert chain.parent(1) == first
    with pytest.raises(AssertionError):
        chain.names(tokens, 0, 3)
