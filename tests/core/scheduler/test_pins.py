"""Any history over a tiered cache: what living requests need stays there, nothing else is kept for anybody, and what
the conductor hears is what is there."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.attempts import BlocksEvicted, BlocksStored, FetchOrder
from isthmus.core.scheduler import Admitted, BlockPool, Limits, Run, Save, Stepped, TierCache
from isthmus.core.types import BlockName, NodeId, RequestId, Tier

from .told import Fact, Told, arrived, expected, fetched, forgotten, imported, lost, offered

SIZE = 4


def names_of(random: Random, count: int) -> tuple[BlockName, ...]:
    """Chains of the same seed share their heads."""
    seed = random.randrange(3) * 100
    return tuple(range(seed, seed + count))


class Beside:
    """A scheduler whose saves take a while. `known`: tokens of each request that lives here, and where it stops."""

    def __init__(self, tiers: tuple[int, int], state_blocks: int, random: Random) -> None:
        limits = Limits(40, SIZE, token_budget=16, max_sequences=3, max_steps=4, state_blocks=state_blocks)
        self.cache, self.random = TierCache(*tiers), random
        self.scheduler = Told(limits, self.cache, BlockPool(40))
        self.known: dict[RequestId, list[int]] = {}
        self.fetching: dict[RequestId, int] = {}
        self.saves: list[RequestId] = []
        self.heard: dict[BlockName, Tier] = {}
        self.run: Run | None = None

    def tell(self, fact: Fact) -> None:
        scheduler = self.scheduler
        for action in scheduler.on(fact):
            self._hear(action)
        scheduler.check()
        self.cache.check()
        pinned = chain.from_iterable([each.pinned for each in scheduler._sequences.values()])
        assert Counter(pinned) == self.cache._pins, "what is kept in the tiers is not what is needed"
        dram, ssd = self.cache.dram.held, self.cache.ssd.held
        assert self.heard == dict.fromkeys(dram, Tier.MEMORY) | dict.fromkeys(ssd, Tier.DISK)

    def _hear(self, action: Any) -> None:
        match action:
            case Run():
                self.run, _ = action, action.pieces
            case Admitted():
                cached, length = action.cached_tokens, self.known[action.request][0]
                assert cached < length, "the last token is computed"
                assert not action.state or cached % SIZE == 0, "a state is at the end of a block"
            case Save():
                self.saves.append(action.request)
            case BlocksStored():
                self.heard |= dict.fromkeys(action.names, action.tier)
            case BlocksEvicted():
                for name in action.names:
                    del self.heard[name]

    def arrive(self, request: RequestId) -> None:
        random = self.random
        num_tokens = random.randint(1, 40)
        names = names_of(random, num_tokens // SIZE)
        about: dict[str, object] = {
            "num_cached": random.randint(0, len(names)),
            "hands_over": random.random() < 0.5,
        }
        if names and random.random() < 0.3:
            start = random.randrange(len(names))
            stop = random.randint(start + 1, len(names))
            about |= {"fetch": FetchOrder(NodeId("peer"), start, stop), "num_cached": stop}
            self.fetching[request] = stop
        self.known[request] = [num_tokens, num_tokens + random.randint(1, 12)]
        self.tell(arrived(request, num_tokens, self.known[request][1], names, **about))

    def step(self) -> None:
        run = self.run
        if run is None:
            return
        self.run, steps = None, self.random.randint(1, run.steps)
        over = []
        for piece in run.pieces:
            tokens = self.known.get(piece.request)
            if tokens is not None and piece.samples:
                tokens[0] += steps
                if tokens[0] >= tokens[1]:
                    over.append(piece.request)
                    del self.known[piece.request]
        self.tell(Stepped(steps, tuple(over)))

    def computes(self, request: RequestId) -> bool:
        return self.scheduler.computes(self.scheduler.of(request))

    def saved(self, request: RequestId) -> None:
        self.tell(lambda scheduler, actions: scheduler.saved(request))

    def drain(self) -> None:
        """All are forgotten, when they may be: then nothing is needed."""
        self.step()
        while any(self.computes(request) for request in self.known):
            self.step()
        for request in list(self.known):
            self.forget(request)
        for request in self.saves:
            self.saved(request)
        assert not self.cache.num_pinned
        assert self.scheduler.pool.available == 40, "blocks did not come back"

    def forget(self, request: RequestId) -> None:
        del self.known[request]
        self.tell(forgotten(request))


@settings(max_examples=60)
@given(st.integers(0, 1 << 32), st.sampled_from([(8, 0), (6, 10), (30, 30)]), st.sampled_from([0, 0, 2]))
def test_tiers_keep_what_living_requests_need_and_nothing_else(
    seed: int, tiers: tuple[int, int], state_blocks: int
) -> None:
    random = Random(seed)
    some = Beside(tiers, state_blocks, random)
    for number in range(60):
        request = random.choice(list(some.known)) if some.known else None
        state = some.scheduler.of(request).state.name if request is not None else ""
        match random.randrange(10):
            case 0 | 1 | 2:
                some.arrive(RequestId(f"r{number}"))
            case 3:
                tokens = some.known[RequestId(f"r{number}")] = [random.randint(1, 30), 40]
                some.tell(expected(RequestId(f"r{number}"), *tokens))
            case 4 if request is not None and state == "RECEIVING":
                some.known[request][0] += 1
                some.tell(imported(request))
            case 5 if request is not None and not some.computes(request):
                some.forget(request)
            case 6 if some.saves:
                some.saved(some.saves.pop(random.randrange(len(some.saves))))
            case 7 if some.fetching:
                fetch = random.choice(list(some.fetching))
                some.tell(fetched(fetch, random.randint(0, some.fetching.pop(fetch))))
            case 8:
                some.tell((lost if random.random() < 0.3 else offered)(names_of(random, random.randint(1, 8))))
            case _:
                some.step()
    some.drain()
