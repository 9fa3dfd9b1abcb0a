"""Nodes whose actions are carried out in whatever order chance says, with nothing moved: an executor that has no time.

What follows from an action is a fact that waits until it is drawn. So grants come before and after prompts are
computed, fetches end before and after they are needed, sessions break in between. Each world keeps its own books of
what a node may do, and believes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple
from zlib import crc32

from isthmus.attempts import (
    BlocksEvicted,
    BlocksStored,
    Entry,
    FetchFinished,
    FetchOrder,
    Holding,
    MemoryUsed,
    PrefillFinished,
    RequestFailed,
    Route,
    Share,
    Spread,
    key_of,
)
from isthmus.blocks import state_names
from isthmus.node import Node, events
from isthmus.node.events import (
    Adopt,
    Begin,
    Broken,
    Claim,
    Cut,
    Demote,
    Drop,
    EndFetch,
    Enough,
    Fetch,
    FetchEnded,
    Finish,
    Forget,
    Found,
    Give,
    Grant,
    Granted,
    Host,
    Land,
    Landed,
    Left,
    Load,
    Loaded,
    Lost,
    Missing,
    Move,
    Offer,
    Promote,
    Read,
    Received,
    Reclaim,
    Reclaimed,
    Release,
    Reserve,
    Reserved,
    Return,
    Sampled,
    Save,
    Send,
    Severed,
    Ship,
    Shipped,
    Shorten,
    Shrink,
    Shrunk,
    Trim,
    Unhost,
    Vacate,
    Wake,
    Wanted,
    Woken,
)
from isthmus.scheduler import (
    Admitted,
    BlockPool,
    Joined,
    Limits,
    Piece,
    Preempted,
    Run,
    Saved,
    Scheduler,
    Stepped,
    TierCache,
)
from isthmus.types import NOBODY, BlockName, NodeId, RequestId, Role, Tenant, Tier

SIZE = 4


def limits_of(num_blocks: int, state_blocks: int) -> Limits:
    return Limits(num_blocks, SIZE, token_budget=16, max_sequences=4, max_steps=4, state_blocks=state_blocks)


class Place:
    """One node, and what its executor holds: a run, blocks in bytes, transfers."""

    def __init__(
        self,
        name: NodeId,
        num_blocks: int,
        tiers: tuple[int, int] | None,
        state_blocks: int = 0,
        stages: int = 1,
        report_ns: int = 0,
    ) -> None:
        self.name, self.stages = name, stages
        self.made = num_blocks, tiers, state_blocks, stages, report_ns
        limits = limits_of(num_blocks, state_blocks)
        scheduler = Scheduler(limits, TierCache(*tiers) if tiers else None, BlockPool(num_blocks), node=name)
        group = {"stages": stages} if stages > 1 else {}
        self.node = Node(dict.fromkeys(Role, limits), scheduler, report_ns=report_ns, **group)
        self.run: Run | None = None
        self.is_cut = False
        self.dram: set[BlockName] = set()
        self.disk: set[BlockName] = set()
        self.came: set[BlockName] = set()  # by the fetch that ended last
        self.offered: set[RequestId] = set()
        self.sending: dict[RequestId, bool] = {}  # whether all is computed
        self.receiving: set[RequestId] = set()
        self.loading: dict[RequestId, Load] = {}
        self.whole: set[RequestId] = set()  # all of its KV came from another node, and that one was told
        self.fetching: dict[RequestId, Fetch] = {}
        self.ordered: set[RequestId] = set()  # fetches that are not over
        self.hosted: dict[RequestId, tuple[int, ...]] = {}
        self.stowed: dict[RequestId, dict[int, Stowed]] = {}  # by the number at the holder
        self.holds: dict[RequestId, dict[NodeId, Room]] = {}  # at home: who was asked for room, and gave it
        self.shipping: dict[RequestId, Shipping] = {}
        self.coming: dict[RequestId, tuple[int, ...]] = {}  # what is written there comes back
        self.spread: dict[RequestId, tuple[Holding, ...]] = {}  # as the conductor was told
        self.usage: dict[RequestId, Entry] = {}  # and what it was told of memory
        self.shares: dict[RequestId, Share] = {}  # of those that are hosted
        self.content: dict[
            RequestId, dict[int, int]
        ] = {}  # which block of a request is in a block of the engine


VOID = -1


class Stowed(NamedTuple):
    """Block `number` of a request, a part of its heads; VOID: of tokens that it never had."""

    number: int
    part: int
    parts: int


class Room:
    """That a holder was asked for, and whether it gave it."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.given = False


class Shipping:
    """Blocks of the engine on their way; `left`: to whom."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.left: set[NodeId] = set()


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


class WantedBack(NamedTuple):
    """A `Reclaim`, at the holder."""

    key: RequestId
    reclaim: Reclaim
    home: Place


class World:
    """`choose(n)` draws a number below n. `log`: reports, in order."""

    def __init__(self, places: list[Place], choose: Callable[[int], int]) -> None:
        self.places = {place.name: place for place in places}
        self._choose = choose
        self.tenants: tuple[Tenant, ...] = (NOBODY,)
        self.now = 0
        self.pending: list[tuple[object, Place, Any]] = []  # channel: what comes over one comes in order
        self.asked: dict[RequestId, Asked] = {}
        self.log: list[Any] = []
        self.loaded: dict[RequestId, int] = {}
        self.spread: set[RequestId] = set()  # whose KV was to lie with others, ever
        self.broken: set[tuple[NodeId, RequestId, str]] = set()  # where what was said to be broken
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
            tenant = self.tenants[crc32(route.request.encode()) % len(self.tenants)]
            begin = Begin(asked.key, part, route, asked.num_tokens, stop, asked.names, tenant)
            self.tell(self.places[name], begin)

    def forget(self, asked: Asked) -> None:
        self._end(asked, "cancelled")

    def sever(self, asked: Asked) -> None:
        for name in (asked.route.prefill, asked.route.decode):
            self.broken.add((name, asked.key, "cut"))
            self.tell(self.places[name], Severed((asked.key,), "cut"))

    def lose(self, name: NodeId, block: BlockName) -> None:
        """The bytes of a block are gone."""
        place = self.places[name]
        if block in place.dram | place.disk:
            place.dram.discard(block)
            place.disk.discard(block)
            self.tell(place, Lost((block,)))

    def move(self, asked: Asked, holder: NodeId, num_blocks: int) -> None:
        self.tell(self.places[asked.route.decode], Move(asked.key, holder, num_blocks))

    def take_back(self, asked: Asked, holder: NodeId, num_blocks: int) -> None:
        self.tell(self.places[asked.route.decode], Return(asked.key, holder, num_blocks))

    def part(self, asked: Asked, holder: NodeId) -> None:
        """The sessions with a holder of it are gone."""
        for name in dict.fromkeys((asked.route.prefill, asked.route.decode)):
            place = self.places[name]
            if holder in place.holds.get(asked.key, {}):
                self.pending = [
                    each for each in self.pending if each[0] not in ((name, holder), (holder, name))
                    or getattr(each[2], "key", None) != asked.key
                ]  # fmt: skip
                self._later(holder, Left(asked.key, name, lost=True), name)
                place.shipping.pop(asked.key, None)
                if asked.key in place.coming:
                    self._later(name, Reclaimed(asked.key, whole=False))
                self.broken.add((name, asked.key, "parted"))
                self.tell(place, Broken(asked.key, "parted"))

    def die(self, name: NodeId) -> list[Asked]:
        """A node is gone, and another of its name is there. Returns the attempts that it cost."""
        gone, fresh = self.places[name], Place(name, *self.places[name].made)
        self.places[name], self.index[name] = fresh, {}
        said, self.pending = [each for each in self.pending if each[1] is not gone], []
        for channel, place, fact in said:  # what it said is not heard, but what follows from its end
            if not isinstance(channel, tuple) or channel[0] != name or isinstance(fact, Enough):
                self.pending.append((channel, place, fact))
            elif isinstance(fact, Left):
                self.pending.append((channel, place, Left(fact.key, name, lost=True)))
        for key, rooms in gone.holds.items():
            for holder in rooms:
                self._later(holder, Left(key, name, lost=True), name)
        for key, fetch in gone.fetching.items():
            self._later(fetch.source, Enough(key, name), name)
        for place in self.places.values():
            for key in [key for key, fetch in place.fetching.items() if fetch.source == name]:
                fetch = place.fetching.pop(key)
                self._later(place.name, Came(fetch, fetch.start))
        cost = []
        for asked in self.asked.values():
            route = asked.route
            handed_over = asked.key in self.places[route.decode].whole
            if not asked.over and (route.decode == name or (route.prefill == name and not handed_over)):
                self._end(asked, "its node is gone")
                cost.append(asked)
        for place in self.places.values():
            for key in [key for key, rooms in place.holds.items() if name in rooms]:
                place.shipping.pop(key, None)
                if key in place.coming:
                    self._later(place.name, Reclaimed(key, whole=False))
                self.broken.add((place.name, key, "parted"))
                self.tell(place, Broken(key, "parted"))
        return cost

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
            if isinstance(fact, WantedBack):
                self._give_back(place, fact)
                return True
            if isinstance(fact, Came):
                fact = FetchEnded(fact.fetch.key, self._take_in(place, fact))
            if isinstance(fact, Reserved) and fact.holder in place.holds.get(fact.key, {}):
                room = place.holds[fact.key][fact.holder]
                room.given |= fact.granted
                if not fact.granted:
                    self.broken.add((place.name, fact.key, f"{fact.holder} has no room for its KV"))
                    if not room.given:
                        self._leave(place, fact.key, fact.holder)
            if isinstance(fact, Shipped) and fact.key in place.shipping:
                place.shipping[fact.key].left.discard(fact.holder)
                if not place.shipping[fact.key].left:
                    del place.shipping[fact.key]
            if isinstance(fact, Reclaimed):
                if fact.key not in place.coming:
                    return True  # it was over before
                del place.coming[fact.key]
            self.tell(place, fact)
        return True

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("it never comes to rest")
        for _ in range(2):
            self.now += 10**12  # every time-out is over
            for place in self.places.values():
                self.tell(place, Woken())
            while self.step():
                pass
        assert all(asked.over for asked in self.asked.values()), "a request never ended"
        for place in self.places.values():
            place.node.check_idle()
            assert not (place.offered or place.sending or place.receiving or place.loading or place.fetching)
            assert not (place.hosted or place.stowed or place.holds or place.shipping or place.coming)
            assert not place.usage, "the conductor believes in memory that is free"
            tiers = place.node.tiers
            if tiers is not None:
                assert place.dram == set(tiers.dram.held), "the tiers and the bytes in DRAM differ"
                assert place.disk == set(tiers.ssd.held), "the tiers and the bytes on the SSD differ"
                held = dict.fromkeys(tiers.dram.held, Tier.MEMORY) | dict.fromkeys(tiers.ssd.held, Tier.DISK)
                assert self.index[place.name] == held, "what the conductor heard is not what the node keeps"

    # Carrying out.

    def tell(self, place: Place, fact: Any) -> None:
        run, read = place.run, self._to_read(place, fact)
        frees = isinstance(fact, Forget) and fact.key in place.node
        landed = isinstance(fact, Landed) and fact.key in place.node
        ends = isinstance(fact, FetchEnded) and self._ends_fetches(place, fact.key)
        actions = place.node.on(fact, self.now)
        assert [action.names for action in actions if isinstance(action, Read)] == read
        assert landed == any(isinstance(action, PrefillFinished) for action in actions), "who let go of what?"
        told = any(isinstance(action, FetchFinished) for action in actions)
        assert told == ends, "whose fetch ended?"
        for action in actions:
            self._carry_out(place, action)
        place.node.check()
        waits = isinstance(fact, Begin) and fact.part is not Role.DECODE and fact.key in place.node
        waits = waits and not any(isinstance(action, Claim) for action in actions)
        if (
            waits
            or frees
            or any(isinstance(action, (Land, RequestFailed, PrefillFinished)) for action in actions)
        ):
            assert place.run is not run or run is None or run.steps == 1 or place.is_cut, (
                "somebody waits for a run"
            )

    def _ends_fetches(self, place: Place, key: RequestId) -> bool:
        """Whether with this fetch all are over of a prompt that is computed here."""
        place.ordered.discard(key)
        owner = RequestId(key.partition("~")[0])
        asked = self.asked.get(owner)
        if asked is None or asked.route.prefill != place.name or owner not in place.node:
            return False
        return not any(other.partition("~")[0] == owner for other in place.ordered)

    def _to_read(self, place: Place, fact: Any) -> list[tuple[BlockName, ...]]:
        """What a prompt that begins needs of the SSD, unless it waits for other nodes anyway."""
        if not isinstance(fact, Begin) or fact.part is Role.DECODE or fact.route.fetch is not None:
            return []
        names = fact.names[: fact.route.num_cached]
        states = place.node.scheduler.limits.state_blocks
        names += state_names(names[-1], states) if states and names else ()
        here = place.dram | place.disk
        found = tuple(takewhile(here.__contains__, names))
        on_disk = tuple([name for name in found if name in place.disk])
        return [on_disk] if on_disk else []

    def _later(self, name: NodeId, fact: Any, source: NodeId | None = None) -> None:
        channel = (source, name) if source is not None else object()
        self.pending.append((channel, self.places[name], fact))

    def _take_in(self, place: Place, came: Came) -> int:
        """Another node gave blocks, to be adopted or not. Returns how many of the prefix are here now."""
        fetch = came.fetch
        place.came = set(fetch.names[fetch.start : came.stop])
        here = place.dram | place.disk | place.came
        return next((at for at, name in enumerate(fetch.names) if name not in here), len(fetch.names))

    def _carry_out(self, place: Place, action: Any) -> None:
        match action:
            case Run():
                assert place.run is None, "a second run"
                place.run, place.is_cut = action, False
                _ = action.pieces
            case Cut():
                assert place.run is not None and place.run.steps > 1 and not place.is_cut, "nothing to cut"
                place.is_cut = True
            case Offer():
                place.offered.add(action.key)
            case Grant():
                assert action.key not in place.receiving
                place.receiving.add(action.key)
                place.content[action.key] = {block: number for number, block in enumerate(action.blocks)}
                self._later(action.peer, Granted(action.key), place.name)
            case Send():
                assert action.key in place.offered, "what was not offered is sent"
                place.offered.discard(action.key)
                place.sending[action.key] = action.computed
                if action.computed:
                    self._arrive(place, action.key)
            case Finish():
                assert place.sending[action.key] is False, "it is sent, and not all of it was computed"
                self._arrive(place, action.key)
            case Land():
                place.receiving.remove(action.key)
                place.whole.add(action.key)
                self._later(action.peer, Landed(action.key), place.name)
            case Load():
                place.loading[action.key] = action
                if action.told:
                    self.loaded[action.key] = self._found(place, action)
                    self._later(place.name, Loaded(action.key, self.loaded[action.key]))
            case Read():
                assert set(action.names) <= place.disk, "what is not on the SSD is read there"
            case Save():
                stays = len(action.names) - action.num_sunk
                place.dram |= set(action.names[:stays])
                place.disk |= set(action.names[stays:])
                self._later(place.name, Saved(action.request))
            case Adopt():
                assert set(action.names) <= place.came, "what did not come is adopted"
                place.dram |= set(action.names)
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
                asked, states = self.asked.get(action.key), place.node.scheduler.limits.state_blocks
                prompt = asked is not None and place.name == asked.route.prefill
                assert action.whole == bool(prompt and states), "a state is of no use in parts"
                place.fetching[action.key] = action
                place.ordered.add(action.key)
                wanted = Wanted(action.key, place.name, action.names, action.start, action.whole)
                self._later(action.source, wanted, place.name)
            case EndFetch():
                fetch = place.fetching.pop(action.key, None)
                if fetch is not None:
                    self._later(fetch.source, Enough(action.key, place.name), place.name)
                    self._later(place.name, Came(fetch, fetch.start))
            case Give():
                self._give(place, action)
            case Reserve():
                holds = place.holds.setdefault(action.key, {})
                room = holds.setdefault(action.holder, Room(action.share))
                assert room.share == action.share, "it has something else there"
                self.spread.add(action.key)
                asked_for = events.Asked(action.key, place.name, action.num_blocks, action.share)
                self._later(action.holder, asked_for, place.name)
            case Host():
                if action.blocks:
                    known = place.hosted.get(action.key, ())
                    assert action.blocks[: len(known)] == known, "what lies here is elsewhere now"
                    place.hosted[action.key] = action.blocks
                    place.stowed.setdefault(action.key, {})
                    rooms = self.places[action.peer].holds.get(action.key, {})
                    if place.name in rooms:  # else who asked is gone
                        place.shares.setdefault(action.key, rooms[place.name].share)
                self._later(action.peer, Reserved(action.key, place.name, bool(action.blocks)), place.name)
            case Claim():
                place.holds.setdefault(action.key, {})[action.holder] = Room(action.share)
                self._later(action.holder, events.Claimed(action.key, place.name, action.old), place.name)
            case events.Rekey():
                self._rekey(place, action)
            case Ship():
                self._ship(place, action)
            case Vacate():
                self._leave(place, action.key, action.holder)
                self._later(action.holder, Left(action.key, place.name), place.name)
            case Reclaim():
                self._reclaim(place, action)
            case Shrink():
                shrunk = Shrunk(action.key, place.name, action.num_blocks)
                self._later(action.holder, shrunk, place.name)
            case Trim():
                place.hosted[action.key] = place.hosted[action.key][: action.num_blocks]
                stowed = place.stowed[action.key]
                place.stowed[action.key] = {at: stowed[at] for at in range(action.num_blocks)}
            case Unhost():
                del place.hosted[action.key], place.stowed[action.key]
                place.shares.pop(action.key, None)
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
                self._failed(place, action)
            case FetchFinished() | PrefillFinished():
                self.log.append(action)
            case Spread():
                place.spread[key_of(action.request, action.attempt)] = action.holdings
            case MemoryUsed():
                self._used(place, action)
            case Admitted() | Joined():
                pass
            case _:
                raise AssertionError(f"what is {action}?")

    def _arrive(self, place: Place, key: RequestId) -> None:
        asked = self.asked[key]
        place.sending.pop(key)
        damaged = not self._choose(8)
        if damaged:
            self.broken.add((asked.route.decode, key, "damaged"))
        self._later(asked.route.decode, Broken(key, "damaged") if damaged else Received(key))

    @staticmethod
    def _leave(place: Place, key: RequestId, holder: NodeId) -> None:
        place.holds.get(key, {}).pop(holder, None)
        if not place.holds.get(key):
            place.holds.pop(key, None)

    def _ship(self, place: Place, ship: Ship) -> None:
        """The bytes are there at once; that they are is heard later."""
        key, holder, room = ship.key, self.places[ship.holder], place.holds[ship.key][ship.holder]
        assert room.given, "it has no room there"
        if key not in place.shipping:
            place.shipping[key] = Shipping(ship.blocks)
        if key not in holder.stowed:  # another attempt has it
            assert self.asked[key].over, "its room is gone"
            return
        shipping, stowed = place.shipping[key], holder.stowed[key]
        assert shipping.blocks == ship.blocks and ship.holder not in shipping.left, "one after the other"
        shipping.left.add(ship.holder)
        stop = ship.first + len(ship.blocks)
        assert len(stowed) >= ship.first and stop <= len(holder.hosted[key]) * room.share.parts
        for at in range(ship.first, len(stowed)):  # what was there is void
            del stowed[at]
        computed = (self.asked[key].num_tokens + self.asked[key].generated - 1) // SIZE
        for at, block in enumerate(ship.blocks, ship.first):
            number = place.content[key][block]
            assert number == room.share.first + at, "it is no share of that"
            assert number < computed, "it is not computed"
            stowed[at] = Stowed(number, room.share.part, room.share.parts)
        self._later(place.name, Shipped(key, ship.holder, stop), ship.holder)

    def _rekey(self, place: Place, rekey: events.Rekey) -> None:
        """It does not know of what tokens it has KV; here that is known."""
        key = rekey.key
        if rekey.old:
            stowed = place.stowed[key] = place.stowed.pop(rekey.old)
            place.hosted[key] = place.hosted.pop(rekey.old)
            share = place.shares.pop(rekey.old, None)
            rooms = self.places[rekey.peer].holds.get(key, {})
            if place.name in rooms:
                if share != rooms[place.name].share:
                    stowed.clear()
                place.shares[key] = rooms[place.name].share
            known = self.asked[key].num_tokens // SIZE
            for at, each in stowed.items():
                if each.number >= known:
                    stowed[at] = each._replace(number=VOID)
        self._later(rekey.peer, Found(key, place.name, len(place.stowed.get(key, ()))), place.name)

    def _reclaim(self, place: Place, reclaim: Reclaim) -> None:
        """The bytes come at once; that they did is heard later, if they all were right."""
        key = reclaim.key
        assert place.holds[key][reclaim.holder].given and key not in place.coming
        place.coming[key] = reclaim.blocks
        self._later(reclaim.holder, WantedBack(key, reclaim, place), place.name)

    def _give_back(self, holder: Place, wanted: WantedBack) -> None:
        key, reclaim, home = wanted
        if home.coming.get(key) != reclaim.blocks or holder.name not in home.holds.get(key, {}):
            return  # it was released
        if key not in holder.stowed:  # another attempt has it
            assert self.asked[key].over, "its room is gone"
            return
        assert reclaim.first + len(reclaim.blocks) == len(holder.stowed[key]), "only the last comes back"
        first = home.holds[key][holder.name].share.first + reclaim.first
        home.content[key] |= {block: first + at for at, block in enumerate(reclaim.blocks)}
        self._later(home.name, Reclaimed(key, whole=bool(self._choose(6))), holder.name)

    def _used(self, place: Place, used: MemoryUsed) -> None:
        """What is told of a node's memory is so, and adds up."""
        for entry in used.entries:
            place.usage[key_of(entry.request, entry.attempt)] = entry
        scheduler = place.node.scheduler
        assert used.num_available == scheduler.pool.available
        owned = {key: entry for key, entry in place.usage.items() if entry.num_blocks or entry.holdings}
        place.usage = owned

    def _attends(self, place: Place, piece: Piece) -> None:
        """All that a piece attends to is somewhere, once: at its holders in order, then here."""
        count = sum(holding.num_blocks for holding in piece.remote)
        place.content[piece.request] = {block: number for number, block in enumerate(piece.blocks, count)}
        if not piece.remote or piece.request not in place.node:
            return
        count = 0
        for holding in piece.remote:
            for part, holder in enumerate(holding.holders):
                assert place.holds[piece.request][holder].given, "a holder was left"
                if self.asked[piece.request].over and piece.request not in self.places[holder].stowed:
                    return  # another attempt has it: nobody hears what comes of this one
                there = self.places[holder].stowed[piece.request]
                found = [there[number] for number in range(holding.num_blocks)]
                expected = [Stowed(count + at, part, len(holding.holders)) for at in range(holding.num_blocks)]
                assert found == expected, "KV lies elsewhere than is said"
            count += holding.num_blocks
        assert count * SIZE <= piece.start, "what is computed is not at home"
        assert (count + len(piece.blocks)) * SIZE >= piece.start + piece.count, "tokens without a block"
        shipping = place.shipping.get(piece.request)
        shipped = shipping.blocks if shipping is not None else ()
        assert piece.blocks[: len(shipped)] == shipped, "what is shipped was let go of before it was there"
        coming = place.coming.get(piece.request, ())
        assert not set(coming) & set(piece.blocks), "what is not back is attended to"

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
        place.shipping.pop(key, None)
        if key in place.coming:  # nothing more is written there
            self._later(place.name, Reclaimed(key, whole=False))
        fetch = place.fetching.pop(key, None)
        if fetch is not None:
            self._later(fetch.source, Enough(key, place.name), place.name)
            self._later(place.name, Came(fetch, fetch.start))

    def _failed(self, place: Place, report: RequestFailed) -> None:
        asked = self.asked.get(key_of(report.request, report.attempt))
        assert self._is_true(place, report, asked), f"why does it say {report.reason!r}?"
        if asked is not None and not asked.over:
            self._end(asked, f"failed: {report.reason}")

    def _is_true(self, place: Place, report: RequestFailed, asked: Asked | None) -> bool:
        """Whether what a node says of an attempt that it gave up is so."""
        key, reason = key_of(report.request, report.attempt), report.reason.removeprefix(f"{place.name}: ")
        if asked is None or reason in ("cut", "damaged", "parted") or reason.endswith("has no room for its KV"):
            return (place.name, key, reason) in self.broken
        if reason == "a prefix it was to take from its cache is not there":
            recall, tiers = asked.route.recall, place.node.tiers
            assert recall is not None and tiers is not None
            own = recall.stop if recall.source == place.name else recall.start
            return tiers.match(asked.names[:own])[0] < own
        if reason == "a prefix it counted on is not in its cache any more":
            return self.loaded[key] < asked.route.handover_start
        if reason == "others needed its memory":
            return key in self.spread
        return reason.startswith("no KV came for ") and key in place.receiving

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
        if place.stages > 1:
            self._execute_first_stage(place, run)
            return
        while steps < run.steps and not ended:
            steps += 1
            for piece in run.pieces:
                asked = self.asked[piece.request]
                route = asked.route
                self._attends(place, piece)
                if place.name == route.decode != route.prefill:
                    assert piece.request in place.whole, "it decodes with KV that is not there"
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

    def _execute_first_stage(self, place: Place, run: Run) -> None:
        """The last stage says by itself what it sampled, before or after the first says that it is through."""
        assert run.steps == 1 and run.chunks == run.pieces, "it decodes nothing"
        place.run = None
        sampled = [self.asked[piece.request] for piece in run.chunks if piece.samples]
        for piece in run.chunks:
            place.loading.pop(piece.request, None)
        ended = [asked for asked in sampled if asked.answer == 1 or not self._choose(12)]
        fact = Sampled(tuple([asked.key for asked in sampled]), tuple([asked.key for asked in ended]))
        early = self._choose(2)
        if early:
            self.tell(place, fact)
        self.tell(place, Stepped(1))
        if not early:
            self.tell(place, fact)
        for asked in ended:
            self._end(asked, "finished")

    def tell_missing(self, place: Place, missing: Missing) -> None:
        place.loading.pop(missing.key, None)
        states = place.node.scheduler.limits.state_blocks
        expected = [Shorten(missing.key, 0 if states else missing.num_blocks * SIZE)]
        shorten, *reports = place.node.on(missing, self.now)
        assert [shorten] == expected
        for report in reports:
            assert isinstance(report, MemoryUsed | Wake)
            self._carry_out(place, report)
        self.tell(place, Stepped(0))

    def _answer(self, asked: Asked) -> tuple[BlockName, ...]:
        full = (asked.num_tokens + asked.generated - 1) // SIZE
        own = [10**6 + crc32(f"{asked.key} {at}".encode()) for at in range(max(0, full - len(asked.names)))]
        return (*asked.names[:full], *own)


def route_of(request: str, prefill: NodeId, decode: NodeId, **fields: Any) -> Route:
    return Route(RequestId(request), 1, prefill, decode, **fields)


def fetch_of(source: NodeId, start: int, stop: int) -> FetchOrder:
    return FetchOrder(source, start, stop)
