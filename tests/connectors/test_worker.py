"""The worker side against an adapter, on tensors instead of vLLM: bytes, failures, and what is told of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch

from isthmus.live.servers.wire import Done, Free, Load, Open, Over, Ready, Refused, Save, Short
from isthmus_vllm.pages import pages_of
from isthmus_vllm.plans import LoadOrder, Plan, Report, SaveOrder
from isthmus_vllm.worker import Worker

from .adapter import Adapter

NUM_BLOCKS = 24
SLICE = 4 * 2 * 10 * 4
LIMIT_S = 90.0
"""Only so that a bug ends a test."""
NAMES = tuple(bytes([at] * 16) for at in range(NUM_BLOCKS))


class Side:
    """A worker over tensors of its own."""

    def __init__(self, path: Path, *, num_staging: int = 8, timeout_s: float = LIMIT_S) -> None:
        self.layers = [torch.randn(NUM_BLOCKS, 4, 2, 10).permute(0, 2, 1, 3) for _ in range(3)]
        pages = pages_of(self.layers, NUM_BLOCKS)
        bytes_ = num_staging * 3 * SLICE
        self.worker = Worker(
            str(path), pages, form="f", model="m", block_size=4, staging_bytes=bytes_, timeout_s=timeout_s
        )
        self.jobs = itertools.count(1)
        self.report = Report()
        self.outcomes: dict[str, bool] = {}

    def poll(self) -> None:
        """What vLLM does each step."""
        self.report += self.worker.take_report()
        self.outcomes |= self.worker.take_outcomes()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)
            self.poll()

    def connect(self) -> None:
        self.until(lambda: self.report.connected)

    def connect_again(self, adapter: Adapter) -> None:
        self.until(lambda: len(adapter.of(Open)) == 2)
        self.until(lambda: self.worker._is_connected)

    def order(self, request: str, first: int, end: int) -> SaveOrder:
        parent = NAMES[first - 1] if first else None
        blocks = tuple(range(first, end))
        return SaveOrder(next(self.jobs), request, f"key {request}", first, parent, NAMES[first:end], blocks)

    def save(self, request: str, first: int, end: int, *, is_over: bool = False) -> None:
        order = self.order(request, first, end)
        self.worker.save(Plan(saves=(order,), over=((request, f"key {request}"),) if is_over else ()))
        self.until(lambda: order.job in self.report.jobs)

    def load(self, request: str, num: int, into: int) -> int:
        load = next(self.jobs)
        blocks = tuple(range(into, into + num))
        self.worker.load(Plan(loads=(LoadOrder(load, request, f"key {request}", NAMES[:num], blocks),)))
        return load

    def loaded(self, request: str, num: int, into: int) -> bool:
        self.load(request, num, into)
        self.until(lambda: request in self.outcomes)
        return self.outcomes.pop(request)


@contextmanager
def side(adapter: Adapter, **settings: Any) -> Iterator[Side]:
    made = Side(adapter.path, **settings)
    try:
        made.connect()
        yield made
    finally:
        made.worker.stop()


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Adapter]:
    with Adapter(tmp_path / "s") as made:
        yield made
    assert not made.errors


def test_what_one_saves_another_loads(adapter: Adapter) -> None:
    with side(adapter) as first:
        first.save("r", 0, 3)
        first.save("r", 3, 5, is_over=True)
        first.until(lambda: adapter.of(Over))
    saves = adapter.of(Save)
    assert [(save.key, save.first, save.parent, len(save.names)) for save in saves] == [
        ("key r", 0, None, 3),
        ("key r", 3, NAMES[2], 2),
    ]
    assert type(adapter.messages[-1]) is Over and not first.report.ended
    with side(adapter) as second:
        before = [layer.clone() for layer in second.layers]
        assert second.loaded("q", 5, into=10)
        for ours, theirs, old in zip(second.layers, first.layers, before, strict=True):
            assert torch.equal(ours[10:15], theirs[:5])
            assert torch.equal(ours[:10], old[:10]) and torch.equal(ours[15:], old[15:])
        second.until(lambda: adapter.of(Done))
    assert len(adapter.of(Load)) == len(adapter.of(Done)) == 1
    assert (adapter.of(Open)[0].form, adapter.of(Open)[0].block_size) == ("f", 4)


def test_a_damaged_block_fails_the_load(adapter: Adapter) -> None:
    with side(adapter) as both:
        both.save("r", 0, 3)
        both.until(lambda: len(adapter.blocks) == 3)
        adapter.damaged.add(NAMES[1])
        assert not both.loaded("q", 3, into=10)
        adapter.damaged.clear()
        assert both.loaded("q", 3, into=10)
        both.until(lambda: len(adapter.of(Done)) == 2)
        assert [done.damaged for done in adapter.of(Done)] == [1, None]


def test_too_few_blocks_fail_the_load(adapter: Adapter) -> None:
    with side(adapter) as both:
        both.save("r", 0, 3)
        adapter.short_after = 2
        assert not both.loaded("q", 3, into=10)
        both.until(lambda: adapter.of(Done))


def test_a_load_that_stands_still_is_given_up(adapter: Adapter) -> None:
    with side(adapter, timeout_s=0.1) as both:
        both.save("r", 0, 3)
        adapter.gate = Semaphore(0)
        assert not both.loaded("q", 3, into=10)
        both.until(lambda: adapter.of(Done))


def test_after_an_abort_no_byte_is_written(adapter: Adapter) -> None:
    with side(adapter) as both:
        both.save("r", 0, 8)
        adapter.gate = gate = Semaphore(1)  # for blocks 0 to 3, and not for 4 to 7
        before = both.layers[2][17].clone()
        load = both.load("q", 8, into=10)
        both.until(lambda: torch.equal(both.layers[2][10:14], both.layers[2][:4]))
        both.worker.load(Plan(aborts=(load,)))
        both.until(lambda: "q" in both.outcomes)
        assert both.outcomes == {"q": False} and torch.equal(before, both.layers[2][17])
        for layer in both.layers:
            layer[10:18] = 7.0  # somebody else's now
        both.until(lambda: adapter.of(Done))
        seals = tuple([adapter._fill(name, slot) for slot, name in enumerate(NAMES[4:8])])
        adapter._send(
            Ready(load, (0, 1, 2, 3), seals)
        )  # late, as the second abort, and unknown: nothing happens
        both.worker.load(Plan(aborts=(load, 99)))
        adapter.gate = None
        gate.release()
        assert both.loaded("p", 8, into=0)
        assert all((layer[10:18] == 7.0).all() for layer in both.layers)
        both.until(lambda: len(adapter.of(Done)) == 2)
        assert both.loaded("p", 8, into=10)


def test_no_adapter_no_loads_and_no_saves(tmp_path: Path) -> None:
    alone = Side(tmp_path / "nobody")
    try:
        assert not alone.loaded("q", 3, into=10)
        alone.save("r", 0, 3, is_over=True)
        assert alone.report.connected is False and alone.report.ended == ("r",)
    finally:
        alone.worker.stop()


def test_who_is_refused_asks_again(tmp_path: Path) -> None:
    with Adapter(tmp_path / "s", refuse="another model") as adapter:
        refused = Side(adapter.path)
        try:
            refused.until(lambda: len(adapter.of(Open)) > 1)
            assert not refused.loaded("q", 3, into=10)
            refused.save("r", 0, 1)
            assert refused.report.ended == ("r",) and all(type(each) is Open for each in list(adapter.messages))
            adapter.refuse = None
            refused.until(lambda: refused.report.connected is True)
        finally:
            refused.worker.stop()


def test_a_lost_connection_fails_loads_ends_saves_and_comes_again(adapter: Adapter) -> None:
    with side(adapter) as both:
        both.save("r", 0, 3)
        both.save("s", 0, 3)
        adapter.die_at = Load
        both.load("q", 3, into=10)
        both.until(lambda: both.outcomes == {"q": False})
        adapter.die_at = None
        both.outcomes.clear()
        both.connect_again(adapter)
        both.save("r", 3, 5)  # what was saved before is the lost one's
        assert both.report.ended == ("r",) and len(adapter.of(Save)) == 2
        both.save("t", 0, 8)  # all staging slots are free again
        assert both.report.ended == ("r",)
        assert both.loaded("q", 3, into=10)


def test_full_staging_ends_the_saving_of_a_request(adapter: Adapter) -> None:
    adapter.keep_slots = True
    with side(adapter, num_staging=4) as both:
        both.save("r", 0, 3)
        both.save("s", 0, 3)  # of which one finds a slot
        both.save("r", 3, 4)
        assert both.report.ended == ("s", "r")
        both.save("r", 4, 5, is_over=True)
        both.until(lambda: adapter.of(Over))
        assert [(save.key, len(save.names)) for save in adapter.of(Save)] == [("key r", 3), ("key s", 1)]


@pytest.mark.parametrize("wrong", [Free((3,)), Free((1, 1)), Refused("late")], ids=repr)
def test_an_answer_out_of_place_ends_the_connection(adapter: Adapter, wrong: Any) -> None:
    with side(adapter) as both:
        adapter._send(Short(1))  # of a load that has ended meanwhile: nothing happens
        adapter._send(wrong)
        both.connect_again(adapter)
        both.save("t", 0, 8)
        both.until(lambda: len(adapter.blocks) == 8)


def test_a_load_of_more_than_was_asked_for_fails(adapter: Adapter) -> None:
    with side(adapter) as both:
        adapter.gate = Semaphore(0)
        seals = (b"",) * 3
        for slots, told in [
            ((0, 1, 2), (seals,) * 3),
            ((0,), ((b"",),)),
            ((9999,), (seals,)),
            ((0, 1), (seals,)),
        ]:
            load = both.load("q", 2, into=10)
            both.until(lambda load=load: any(one.load == load for one in adapter.of(Load)))
            adapter._send(Ready(load, slots, told))
            both.until(lambda: "q" in both.outcomes)
            assert both.outcomes.pop("q") is False
        assert len(adapter.of(Open)) == 1


def test_slots_come_back(adapter: Adapter) -> None:
    with side(adapter, num_staging=2) as both:
        for first in range(0, 20, 2):
            both.until(lambda: len(both.worker._slots._free) == 2)
            both.save("r", first, first + 2)
        assert not both.report.ended
        both.until(lambda: len(adapter.blocks) == 20)
