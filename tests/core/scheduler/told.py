"""A scheduler that is told one fact at a time, and answers with what follows and the next run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from isthmus.core.scheduler import Actions, Scheduler, Sequence, Stepped
from isthmus.core.types import BlockName, RequestId

Fact = Callable[["Told", Actions], None] | Stepped


class Reserved(msgspec.Struct, frozen=True):
    """An expected request may be received into `blocks`, its recurrent state into `state`."""

    request: RequestId
    blocks: tuple[int, ...]
    state: tuple[int, ...] = ()


class Expected(Sequence):
    def reserved(self) -> Actions:
        return [Reserved(self.request, self.blocks, self.restore)]


class Told(Scheduler):
    def on(self, fact: Fact, now: int = 0) -> list[Any]:
        actions: list[Any] = []
        if isinstance(fact, Stepped):
            self.step(fact, actions)
        else:
            fact(self, actions)
        self.plan(actions, now)
        return actions

    def of(self, request: RequestId) -> Sequence:
        """Who nobody knows any more is nobody."""
        return self._sequences.get(request) or Sequence(request, 1, 2)


def arrived(
    request: RequestId, num_tokens: int, stop_length: int, names: tuple[BlockName, ...] = (), **about: Any
) -> Fact:
    sequence = Sequence(request, num_tokens, stop_length, names)
    for name, value in about.items():
        setattr(sequence, name, value)
    return lambda scheduler, actions: scheduler.arrive(sequence)


def expected(request: RequestId, num_tokens: int, stop_length: int, **about: Any) -> Fact:
    sequence = Expected(request, num_tokens, stop_length)
    for name, value in about.items():
        setattr(sequence, name, value)
    return lambda scheduler, actions: scheduler.expect(sequence, actions)


def imported(request: RequestId) -> Fact:
    return lambda scheduler, actions: scheduler.imported(scheduler.of(request))


def fetched(request: RequestId, stop: int) -> Fact:
    return lambda scheduler, actions: scheduler.fetched(scheduler.of(request), stop, actions)


def offered(names: tuple[BlockName, ...]) -> Fact:
    return lambda scheduler, actions: scheduler.keep(names, actions, RequestId("fetched"))


def missing(request: RequestId, num_blocks: int) -> Fact:
    return lambda scheduler, actions: scheduler.missing(scheduler.of(request), num_blocks)


def lost(names: tuple[BlockName, ...]) -> Fact:
    return lambda scheduler, actions: scheduler.lose(names, actions)


def recovered(chains: tuple[tuple[BlockName, ...], ...]) -> Fact:
    return lambda scheduler, actions: scheduler.recover(chains, actions)


def forgotten(request: RequestId) -> Fact:
    return lambda scheduler, actions: scheduler.forget(scheduler.of(request))
