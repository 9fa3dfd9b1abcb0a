"""Nodes whose actions are carried out in whatever order chance says, with nothing moved: an executor that has no time.

What follows from an action is a fact that waits until it is drawn. So grants come before and after prompts are
computed, fetches end before and after they are needed, sessions break in between. Each world keeps its own books of
what a node may do, and believes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from isthmus.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    PrefillFinished,
    RequestFailed,
    Route,
    key_of,
)
from isthmus.attempts import Fetch as FetchOrder
from isthmus.node import Node
from isthmus.node.events import (
    Begin,
    Broken,
    Copy,
    Cut,
    Demote,
    Drop,
    EndFetch,
    Enough,
    Fetch,
    FetchEnded,
    Finish,
    Forget,
    Give,
    Grant,
    Granted,
    Land,
    Landed,
    Load,
    Loaded,
    Lost,
    Missing,
    Offer,
    Promote,
    Read,
    Received,
    Release,
    Save,
    Send,
    Severed,
    Shorten,
    Wake,
    Wanted,
    Woken,
)
from isthmus.scheduler import (
    Admitted,
    BlockPool,
    Joined,
    Limits,
    Preempted,
    Run,
    Saved,
    Scheduler,
    Stepped,
    TierCache,
)
from isthmus.types import BlockName, NodeId, RequestId, Role, Tier

SIZE = 4


def limits_of(num_blocks: int, state_blocks: int) -> Limits:
    return Limits(num_blocks, SIZE, token_budget=16, max_sequences=4, max_steps=4, state_blocks=state_blocks)


class Place:
    """One node, and what its executor holds: a run, blocks in bytes, transfers."""

    def __init__(
        self, name: NodeId, num_blocks: int, tiers: tuple[int, int] | None, state_blocks: int = 0
    ) -> None:
        self.name = name
        limits = limits_of(num_blocks, state_blocks)
        scheduler = Scheduler(limits, TierCache(*tiers) if tiers else None, BlockPool(num_blocks), node=name)
        self.node = Node(dict.fromkeys(Role, limits), scheduler)
        self.run: Run | None = None
        self.is_cut = False
        self.dram: set[BlockName] = set()
        self.disk: set[BlockName] = set()
        self.offered: set[RequestId] = set()
        self.sending: dict[RequestId, bool] = {}  # whether all is computed
        self.receiving: set[RequestId] = set()
        self.loading: dict[RequestId, Load] = {}
        self.fetching: dict[RequestId, Fetch] = {}


class Asked:
    """A request, and the attempt that is under way."""

    def __init__(self, route: Route, num_tokens: int, answer: int, names: tuple[BlockName, ...]) -> None:
        self.route, self.num_tokens, self.answer, self.names = route, num_tokens, answer, names
        self.generated = 0
        self.over = ""

    @property
    def key(self) -> RequestId:
        return key_of(self.route.request, self.route.attempt)


class Came(NamedTuple):
    """Blocks of a fetch on their way, up to `stop`."""

    fetch: Fetch
    stop: int


class World:
    """`choose(n)` draws a number below n. `log`: reports, in order."""

    def __init__(self, places: list[Place], choose: Callable[[int], int]) -> None:
        self.places = {place.name: place for place in places}
        self._choose = choose
        self.now = 0
        self.pending: list[tuple[object, Place, Any]] = []  # channel: what comes over one comes in order
        self.asked: dict[RequestId, Asked] = {}
        self.log: list[Any] = []
        self.index: dict[NodeId, dict[BlockName, Tier]] = {place.name: {} for place in places}

    # What happens to it.

    def ask(self, asked: Asked) -> None:
        route = asked.route
        self.asked[asked.key] = asked
        parts = {route.decode: Role.DECODE, route.prefill: Role.PREFILL}
        if route.decode == route.prefill:
            parts = {route.prefill: Role.MIXED}
        for name, part in parts.items():
            stop = asked.num_tokens + asked.answer
            begin = Begin(asked.key, part, route, asked.num_tokens, stop, asked.names)
            self.tell(self.places[name], begin)

    def forget(self, asked: Asked) -> None:
        self._end(asked, "cancelled")

    def sever(self, asked: Asked) -> None:
        for name in (asked.route.prefill, asked.route.decode):
            self.tell(self.places[name], Severed((asked.key,), "cut"))

    def copy(self, target: NodeId, source: NodeId, names: tuple[BlockName, ...]) -> None:
        self.tell(self.places[target], Copy(names, source))

    def lose(self, name: NodeId, block: BlockName) -> None:
        """The bytes of a block are gone."""
        place = self.places[name]
        if block in place.dram | place.disk:
            place.dram.discard(block)
            place.disk.discard(block)
            self.tell(place, Lost((block,)))

    def step(self) -> bool:
        """Something that may happen happens; False when nothing can."""
        self.now += 1
        runs = [place for place in self.places.values() if place.run is not None and self._may_run(place)]
        count = len(runs) + len(self.pending)
        if not count:
            return False
        drawn = self._choose(count)
        if drawn < len(runs):
            self._execute(runs[drawn])
        else:
            channel = self.pending[drawn - len(runs)][0]
            first = next(at for at, (other, _, _) in enumerate(self.pending) if other == channel)
            _, place, fact = self.pending.pop(first)
            if isinstance(fact, Came):
                fact = FetchEnded(fact.fetch.key, self._take_in(place, fact))
            self.tell(place, fact)
        return True

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("it never comes to rest")
        self.now += 10**12  # every time-out is over
        for place in self.places.values():
            self.tell(place, Woken())
        while self.step():
            pass
        assert all(asked.over for asked in self.asked.values()), "a request never ended"
        for place in self.places.values():
            place.node.check_idle()
            assert not (place.offered or place.sending or place.receiving or place.loading or place.fetching)
            tiers = place.node.tiers
            if tiers is not None:
                assert place.dram == set(tiers.dram.held), "the tiers and the bytes in DRAM differ"
                assert place.disk == set(tiers.ssd.held), "the tiers and the bytes on the SSD differ"
                held = dict.fromkeys(tiers.dram.held, Tier.MEMORY) | dict.fromkeys(tiers.ssd.held, Tier.DISK)
                assert self.index[place.name] == held, "what the conductor heard is not what the node keeps"

    # Carrying out.

    def tell(self, place: Place, fact: Any) -> None:
        for action in place.node.on(fact, self.now):
            self._carry_out(place, action)
        place.node.check()

    def _later(self, name: NodeId, fact: Any, source: NodeId | None = None) -> None:
        channel = (source, name) if source is not None else object()
        self.pending.append((channel, self.places[name], fact))

    def _take_in(self, place: Place, came: Came) -> int:
        """Blocks that another node gave are in DRAM. Returns how many of the prefix are here now."""
        tiers, fetch = place.node.tiers, came.fetch
        for name in fetch.names[fetch.start : came.stop]:
            if tiers is not None and not tiers.holds(name):
                place.dram.add(name)
        here = place.dram | place.disk
        return next((at for at, name in enumerate(fetch.names) if name not in here), len(fetch.names))

    def _carry_out(self, place: Place, action: Any) -> None:
        match action:
            case Run():
                assert place.run is None, "a second run"
                place.run, place.is_cut = action, False
                _ = action.pieces
            case Cut():
                assert place.run is not None
                place.is_cut = True
            case Offer():
                place.offered.add(action.key)
            case Grant():
                assert action.key not in place.receiving
                place.receiving.add(action.key)
                self._later(action.peer, Granted(action.key), place.name)
            case Send():
                assert action.key in place.offered, "what was not offered is sent"
                place.offered.discard(action.key)
                place.sending[action.key] = action.computed
                if action.computed:
                    self._arrive(place, action.key)
            case Finish():
                if action.key in place.sending:
                    assert not place.sending[action.key]
                    place.sending[action.key] = True
                    self._arrive(place, action.key)
            case Land():
                place.receiving.discard(action.key)
                self._later(action.peer, Landed(action.key), place.name)
            case Load():
                place.loading[action.key] = action
                if action.told:
                    self._later(place.name, Loaded(action.key, self._found(place, action)))
            case Read():
                assert set(action.names) <= place.disk, "what is not on the SSD is read there"
            case Save():
                stays = len(action.names) - action.num_sunk
                place.dram |= set(action.names[:stays])
                place.disk |= set(action.names[stays:])
                self._later(place.name, Saved(action.request))
            case Promote():
                assert set(action.names) <= place.disk
                place.disk -= set(action.names)
                place.dram |= set(action.names)
            case Demote():
                assert set(action.names) <= place.dram | place.disk, "what is not here is demoted"
                place.dram -= set(action.names)
                place.disk |= set(action.names)
            case Drop():
                place.dram -= set(action.names)
                place.disk -= set(action.names)
            case Fetch():
                place.fetching[action.key] = action
                wanted = Wanted(action.key, place.name, action.names, action.start, action.whole)
                self._later(action.source, wanted, place.name)
            case EndFetch():
                fetch = place.fetching.pop(action.key, None)
                if fetch is not None:
                    self._later(fetch.source, Enough(action.key, place.name), place.name)
                    self._later(place.name, Came(fetch, fetch.start))
            case Give():
                self._give(place, action)
            case Shorten():
                pass
            case Preempted():
                place.loading.pop(action.request, None)
            case Release():
                self._release(place, action.key)
            case Wake():
                self._later(place.name, Woken())
            case BlocksStored():
                self.index[place.name] |= dict.fromkeys(action.names, action.tier)
                self.log.append(action)
            case BlocksEvicted():
                for name in action.names:
                    self.index[place.name].pop(name)
                self.log.append(action)
            case RequestFailed():
                self._failed(action)
            case FetchFinished() | PrefillFinished():
                self.log.append(action)
            case Admitted() | Joined():
                pass
            case _:
                raise AssertionError(f"what is {action}?")

    def _arrive(self, place: Place, key: RequestId) -> None:
        asked = self.asked[key]
        place.sending.pop(key)
        self._later(asked.route.decode, Received(key) if self._choose(8) else Broken(key, "damaged"))

    def _give(self, place: Place, give: Give) -> None:
        target = self.places[give.peer]
        fetch = target.fetching.pop(give.key, None)
        if fetch is None:
            return
        self._later(place.name, Enough(give.key, give.peer))
        self._later(give.peer, Came(fetch, give.stop))

    def _release(self, place: Place, key: RequestId) -> None:
        for books in (place.sending, place.loading):
            books.pop(key, None)
        place.offered.discard(key)
        place.receiving.discard(key)
        fetch = place.fetching.pop(key, None)
        if fetch is not None:
            self._later(fetch.source, Enough(key, place.name), place.name)
            self._later(place.name, Came(fetch, fetch.start))

    def _failed(self, report: RequestFailed) -> None:
        asked = self.asked.get(key_of(report.request, report.attempt))
        if asked is not None and not asked.over:
            self._end(asked, f"failed: {report.reason}")

    def _end(self, asked: Asked, how: str) -> None:
        """As the head does: both nodes are to forget it."""
        if asked.over:
            return
        asked.over = how
        for name in dict.fromkeys((asked.route.prefill, asked.route.decode)):
            self._later(name, Forget(asked.key))

    # Runs.

    def _found(self, place: Place, load: Load) -> int:
        """Of the blocks of a load, how many lie here."""
        here = place.dram | place.disk
        return next((at for at, name in enumerate(load.names) if name not in here), len(load.names))

    def _may_run(self, place: Place) -> bool:
        """What is fetched for its prompts has come, or will not."""
        assert place.run is not None
        loads = [place.loading[piece.request] for piece in place.run.chunks if piece.request in place.loading]
        return not any(load.arriving and load.key in place.fetching for load in loads)

    def _execute(self, place: Place) -> None:
        run, steps = place.run, 0
        assert run is not None
        for piece in run.chunks:
            load = place.loading.get(piece.request)
            if load is not None and (found := self._found(place, load)) < len(load.names):
                place.run = None
                self.tell_missing(place, Missing(piece.request, found))
                return
        ended: list[Asked] = []
        while steps < run.steps and not ended:
            steps += 1
            for piece in run.pieces:
                asked = self.asked[piece.request]
                if piece.samples:
                    asked.generated += 1
                    if asked.generated == asked.answer or not self._choose(12):
                        ended.append(asked)
            if place.is_cut:
                break
        place.run = None
        for piece in run.chunks:
            place.loading.pop(piece.request, None)
        answers = tuple([self._answer(asked) for asked in ended]) if place.node.keeps_answers else ()
        self.tell(place, Stepped(steps, tuple([asked.key for asked in ended]), answers))
        for asked in ended:
            self._end(asked, "finished")

    def tell_missing(self, place: Place, missing: Missing) -> None:
        place.loading.pop(missing.key, None)
        self.tell(place, missing)
        self.tell(place, Stepped(0))

    def _answer(self, asked: Asked) -> tuple[BlockName, ...]:
        full = (asked.num_tokens + asked.generated - 1) // SIZE
        own = [hash((asked.key, at)) % 10**9 + 10**6 for at in range(max(0, full - len(asked.names)))]
        return (*asked.names[:full], *own)


def route_of(request: str, prefill: NodeId, decode: NodeId, **fields: Any) -> Route:
    return Route(RequestId(request), 1, prefill, decode, **fields)


def fetch_of(source: NodeId, start: int, stop: int) -> FetchOrder:
    return FetchOrder(source, start, stop)
