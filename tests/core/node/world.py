"""Nodes whose actions are carried out in whatever order chance says, with nothing moved: an executor that has no time.

What follows from an action is a fact that waits until it is drawn. So grants come before and after prompts are
computed, fetches end before and after they are needed, sessions break in between. Letters and KV between two nodes keep
their order. Each world keeps its own books of what a node may do, and believes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple
from zlib import crc32

from isthmus.core.attempts import (
    BlocksEvicted,
    BlocksStored,
    FetchFinished,
    FetchOrder,
    Holding,
    HoldingsChanged,
    MemoryEntry,
    MemoryUsed,
    PrefillFinished,
    RequestFailed,
    Route,
    Share,
    key_of,
)
from isthmus.core.blocks import state_names
from isthmus.core.node import Node, events, letters
from isthmus.core.scheduler import (
    Admitted,
    BlockPool,
    Joined,
    Piece,
    Preempted,
    Run,
    Saved,
    Scheduler,
    SchedulerLimits,
    Stepped,
    TierCache,
)
from isthmus.core.types import NOBODY, BlockName, NodeId, RequestId, Role, Tenant, Tier

SIZE = 4


def limits_of(num_blocks: int, state_blocks: int) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks, SIZE, token_budget=16, max_sequences=4, max_steps=4, state_blocks=state_blocks
    )


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
        self.loading: dict[RequestId, events.LoadBlocks] = {}
        self.whole: set[RequestId] = set()  # all of its KV came from another node, and that one was told
        self.fetching: dict[RequestId, events.Fetch] = {}
        self.ordered: set[RequestId] = set()  # fetches that are not over
        self.hosted: dict[RequestId, tuple[int, ...]] = {}
        self.stowed: dict[RequestId, list[Part]] = {}  # of those that are hosted: what is whole
        self.homes: dict[RequestId, set[NodeId]] = {}  # who may ship it
        self.holds: dict[RequestId, dict[NodeId, Room]] = {}  # at home: who was asked for room, and gave it
        self.lines: set[NodeId] = set()
        self.shipping: dict[RequestId, Shipping] = {}
        self.coming: dict[RequestId, events.Reclaim] = {}  # what is written there comes back
        self.spread: dict[RequestId, tuple[Holding, ...]] = {}  # as the conductor was told
        self.usage: dict[RequestId, MemoryEntry] = {}  # and what it was told of memory
        self.shares: dict[RequestId, Share] = {}  # of those that are hosted
        self.content: dict[
            RequestId, dict[int, int]
        ] = {}  # which block of a request is in a block of the engine


VOID = -1


class Part(NamedTuple):
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

    @property
    def ends(self) -> tuple[NodeId, NodeId]:
        """The two nodes of its hand-over, if there is one."""
        return self.route.prefill, self.route.decode


class Came(NamedTuple):
    """Blocks of a fetch on their way, up to `stop`."""

    fetch: events.Fetch
    stop: int


class Freight(NamedTuple):
    """KV on its way to a holder: what is there from `first` on is void as soon as the first of it comes. Nothing of it
    comes any more when its home has let go of `shipping`."""

    key: RequestId
    home: Place
    shipping: Shipping
    first: int
    parts: list[Part]
    begun: bool = False


class Homeward(NamedTuple):
    """KV on its way back from a holder."""

    key: RequestId
    holder: Place
    numbers: list[int]


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
        self.cut: set[tuple[NodeId, NodeId]] = (
            set()
        )  # whose session with whom ended, and who has not heard that
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
            begin = events.StartAttempt(asked.key, part, route, asked.num_tokens, stop, asked.names, tenant)
            self.tell(self.places[name], begin)

    def forget(self, asked: Asked) -> None:
        self._end(asked, "cancelled")

    def sever(self, one: NodeId, other: NodeId) -> None:
        """The session between two nodes ends, and what is on its way over it is lost."""
        ways = {(one, other): None, (other, one): None}
        self.pending = [each for each in self.pending if each[0] not in ways]
        for name, peer in ways:
            self.cut.add((name, peer))
            self._later(name, events.Gone(peer, "cut"), peer)

    def lose(self, name: NodeId, block: BlockName) -> None:
        """The bytes of a block are gone."""
        place = self.places[name]
        if block in place.dram | place.disk:
            place.dram.discard(block)
            place.disk.discard(block)
            self.tell(place, events.BlocksLost((block,)))

    def move(self, asked: Asked, holder: NodeId, num_blocks: int) -> None:
        self._order(events.Lend, asked, holder, num_blocks)

    def take_back(self, asked: Asked, holder: NodeId, num_blocks: int) -> None:
        self._order(events.Repay, asked, holder, num_blocks)

    def _order(
        self, kind: type[events.Lend | events.Repay], asked: Asked, holder: NodeId, num_blocks: int
    ) -> None:
        route = asked.route
        self.tell(
            self.places[route.decode], kind(route.request, route.attempt, route.decode, holder, num_blocks)
        )

    def part(self, asked: Asked, holder: NodeId) -> None:
        """The sessions with a holder of it are gone."""
        for name in dict.fromkeys((asked.route.prefill, asked.route.decode)):
            if holder in self.places[name].holds.get(asked.key, {}):
                self.sever(name, holder)

    def die(self, name: NodeId) -> list[Asked]:
        """A node is gone, and another of its name is there. Returns the attempts that it cost."""
        gone = self.places[name]
        for other in self.places:
            if other != name:
                self.sever(name, other)
        self.pending = [each for each in self.pending if each[1] is not gone]
        self.cut = {(here, there) for here, there in self.cut if here != name}
        self.places[name], self.index[name] = Place(name, *gone.made), {}
        cost = []
        for asked in self.asked.values():
            route = asked.route
            handed_over = asked.key in self.places[route.decode].whole
            if not asked.over and (route.decode == name or (route.prefill == name and not handed_over)):
                self._end(asked, "its node is gone")
                cost.append(asked)
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
            if isinstance(fact, Came):
                fact = events.BlocksFetched(fact.fetch.key, self._take_in(place, fact))
            match fact:
                case Freight():
                    self._arrives(place, fact)
                    return True
                case Homeward():
                    self._comes_home(place, fact)
                    return True
                case events.Gone(peer):
                    self._lost(place, peer)
                case events.LetterReceived(peer, letter):
                    self._read(place, peer, letter)
            self.tell(place, fact)
        return True

    def _lost(self, place: Place, peer: NodeId) -> None:
        """What may fail now, for that reason."""
        self.cut.discard((place.name, peer))
        place.lines.discard(peer)
        for key in self.asked:
            if key in place.node:
                for reason in (
                    f"the session with {peer} ended: cut",
                    f"{peer}, which has its KV, is gone: cut",
                ):
                    self.broken.add((place.name, key, reason))
                self.broken.add((place.name, key, f"{peer} has no room for its KV"))

    def _read(self, place: Place, peer: NodeId, letter: letters.Letter) -> None:
        """What follows from a letter for the books of who gets it."""
        room = place.holds.get(letter.key, {}).get(peer)
        match letter:
            case letters.ReserveReply(key, granted) if room is not None:
                room.given |= granted
                if not granted:
                    self.broken.add((place.name, key, f"{peer} has no room for its KV"))
            case letters.ShipmentConfirmed(key, _, damaged) if key in place.shipping and not damaged:
                place.shipping[key].left.discard(peer)
                if not place.shipping[key].left:
                    del place.shipping[key]

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            raise AssertionError("it never comes to rest")
        for _ in range(2):
            self.now += 10**12  # every time-out is over
            for place in self.places.values():
                self.tell(place, events.Woken())
            while self.step():
                pass
        assert all(asked.over for asked in self.asked.values()), "a request never ended"
        for place in self.places.values():
            place.node.check_idle()
            assert not (place.offered or place.sending or place.receiving or place.loading or place.fetching)
            assert not (place.hosted or place.stowed or place.homes or place.shares)
            assert not (place.holds or place.shipping or place.coming)
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
        frees = isinstance(fact, events.DropAttempt) and fact.key in place.node
        landed = (
            isinstance(fact, events.LetterReceived)
            and isinstance(fact.letter, letters.HandoverConfirmed)
            and fact.letter.key in place.node
        )
        ends = isinstance(fact, events.BlocksFetched) and self._ends_fetches(place, fact.key)
        actions = place.node.on(fact, self.now)
        assert [action.names for action in actions if isinstance(action, events.Read)] == read
        assert landed == any(isinstance(action, PrefillFinished) for action in actions), "who let go of what?"
        told = any(isinstance(action, FetchFinished) for action in actions)
        assert told == ends, "whose fetch ended?"
        for action in actions:
            self._carry_out(place, action)
        place.node.check()
        assert place.node.num_hosted == sum(map(len, place.hosted.values())), "room that nobody has"
        for key, stowed in place.stowed.items():
            assert place.node.num_stowed(key) <= len(stowed), "KV counts that is not there"
        said = {type(action.letter) for action in actions if isinstance(action, events.SendLetter)}
        waits = (
            isinstance(fact, events.StartAttempt) and fact.part is not Role.DECODE and fact.key in place.node
        )
        ends = any(isinstance(action, (RequestFailed, PrefillFinished)) for action in actions)
        letter = fact.letter if isinstance(fact, events.LetterReceived) else None
        frees |= isinstance(letter, letters.Shrink) and any(
            isinstance(each, events.Trim | events.Unhost) for each in actions
        )
        if (waits and letters.ClaimRequest not in said) or frees or letters.HandoverConfirmed in said or ends:
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
        if (
            not isinstance(fact, events.StartAttempt)
            or fact.part is Role.DECODE
            or fact.route.fetch is not None
        ):
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

    def _over(self, place: Place, peer: NodeId, fact: Any) -> None:
        """It goes over the session with another node, which may be over."""
        if (place.name, peer) not in self.cut:
            self._later(peer, fact, place.name)

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
            case events.Cut():
                assert place.run is not None and place.run.steps > 1 and not place.is_cut, "nothing to cut"
                place.is_cut = True
            case events.OfferHandover():
                place.offered.add(action.key)
            case events.ReceiveHandover():
                assert action.key not in place.receiving
                place.receiving.add(action.key)
                place.content[action.key] = {block: number for number, block in enumerate(action.blocks)}
            case events.SendHandover():
                assert action.key in place.offered, "what was not offered is sent"
                place.offered.discard(action.key)
                place.sending[action.key] = action.computed
                if action.computed:
                    self._arrive(place, action.key)
            case events.FinishHandover():
                assert place.sending[action.key] is False, "it is sent, and not all of it was computed"
                self._arrive(place, action.key)
            case events.SendLetter():
                self._say(place, action.peer, action.letter)
            case events.LoadBlocks():
                place.loading[action.key] = action
                if action.told:
                    self.loaded[action.key] = self._found(place, action)
                    self._later(place.name, events.Loaded(action.key, self.loaded[action.key]))
            case events.Read():
                assert set(action.names) <= place.disk, "what is not on the SSD is read there"
            case events.SaveBlocks():
                stays = len(action.names) - action.num_sunk
                place.dram |= set(action.names[:stays])
                place.disk |= set(action.names[stays:])
                self._later(place.name, Saved(action.request))
            case events.AdoptBlocks():
                assert set(action.names) <= place.came, "what did not come is adopted"
                place.dram |= set(action.names)
            case events.Promote():
                assert set(action.names) <= place.disk
                place.disk -= set(action.names)
                place.dram |= set(action.names)
            case events.Demote():
                assert set(action.names) <= place.dram | place.disk, "what is not here is demoted"
                place.dram -= set(action.names)
                place.disk |= set(action.names)
            case events.DropBlocks():
                place.dram -= set(action.names)
                place.disk -= set(action.names)
            case events.Fetch():
                asked, states = self.asked.get(action.key), place.node.scheduler.limits.state_blocks
                prompt = asked is not None and place.name == asked.route.prefill
                assert action.whole == bool(prompt and states), "a state is of no use in parts"
                place.fetching[action.key] = action
                place.ordered.add(action.key)
            case events.EndFetch():
                self._end_fetch(place, action.key)
            case events.Give():
                self._give(place, action)
            case events.Host(key, peer, share, blocks):
                known = place.hosted.get(key, ())
                assert blocks[: len(known)] == known, "what lies here is elsewhere now"
                assert place.shares.setdefault(key, share) == share
                place.hosted[key] = blocks
                place.stowed.setdefault(key, [])
                place.homes.setdefault(key, set()).add(peer)
            case events.Rekey():
                self._rekey(place, action)
            case events.OpenLine():
                place.lines.add(action.peer)
            case events.Ship():
                self._ship(place, action)
            case events.Reclaim():
                assert place.holds[action.key][action.holder].given and action.key not in place.coming
                place.coming[action.key] = action
            case events.Trim(key, num_blocks):
                place.hosted[key] = place.hosted[key][:num_blocks]
                del place.stowed[key][num_blocks:]
            case events.Unhost(key, None):
                del place.hosted[key], place.stowed[key], place.homes[key], place.shares[key]
            case events.Unhost(key, peer):
                place.homes[key].remove(peer)
            case events.Shorten():
                pass
            case Preempted():
                place.loading.pop(action.request, None)
            case events.ReleaseResources():
                self._release(place, action.key)
            case events.Wake():
                self._later(place.name, events.Woken())
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
            case HoldingsChanged():
                place.spread[key_of(action.request, action.attempt)] = action.holdings
            case MemoryUsed():
                self._used(place, action)
            case Admitted() | Joined() | events.EndGive():
                pass
            case _:
                raise AssertionError(f"what is {action}?")

    def _arrive(self, place: Place, key: RequestId) -> None:
        asked = self.asked[key]
        place.sending.pop(key)
        damaged = not self._choose(8)
        if damaged:
            self.broken.add((asked.route.decode, key, "damaged"))
        self._over(
            place,
            asked.route.decode,
            events.Broken(key, "damaged") if damaged else events.HandoverComplete(key),
        )

    def _say(self, place: Place, peer: NodeId, letter: letters.Letter) -> None:
        key, rooms = letter.key, place.holds
        match letter:
            case letters.HandoverConfirmed():
                place.receiving.remove(key)
                place.whole.add(key)
            case letters.ReserveRequest(share=share):
                room = rooms.setdefault(key, {}).setdefault(peer, Room(share))
                assert room.share == share, "it has something else there"
                self.spread.add(key)
            case letters.ClaimRequest(share=share):
                rooms.setdefault(key, {})[peer] = Room(share)
            case letters.Shrink(num_blocks=0):
                self._leave(place, key, peer)
        self._over(place, peer, events.LetterReceived(place.name, letter))

    @staticmethod
    def _leave(place: Place, key: RequestId, holder: NodeId) -> None:
        place.holds.get(key, {}).pop(holder, None)
        if not place.holds.get(key):
            place.holds.pop(key, None)

    def _ship(self, place: Place, ship: events.Ship) -> None:
        """Home ships to a holder, or a holder home."""
        key, peer = ship.key, ship.peer
        if key in place.hosted:
            assert peer in place.homes[key] and ship.first == 0
            first = place.hosted[key].index(ship.blocks[0])
            assert place.hosted[key][first : first + len(ship.blocks)] == ship.blocks
            parts = place.stowed[key][first : first + len(ship.blocks)]
            assert len(parts) == len(ship.blocks), "what is not whole is sent back"
            self._over(place, peer, Homeward(key, place, [part.number for part in parts]))
            return
        room = place.holds[key][peer]
        assert room.given, "it has no room there"
        shipping, share = place.shipping.setdefault(key, Shipping(ship.blocks)), room.share
        assert shipping.blocks == ship.blocks and peer not in shipping.left, "one after the other"
        shipping.left.add(peer)
        computed = (self.asked[key].num_tokens + self.asked[key].generated - 1) // SIZE
        numbers = [place.content[key][block] for block in ship.blocks]
        assert numbers == [share.first + ship.first + at for at in range(len(numbers))], (
            "it is no share of that"
        )
        assert numbers[-1] < computed, "it is not computed"
        parts = [Part(number, share.part, share.parts) for number in numbers]
        self._over(place, peer, Freight(key, place, shipping, ship.first, parts))

    def _arrives(self, place: Place, freight: Freight) -> None:
        """First what is to be written over counts no more, then all is there. Of who left nothing is written."""
        key, home, shipping, first, parts, begun = freight
        if home.shipping.get(key) is not shipping or home.name not in place.homes.get(key, ()):
            return
        stowed = place.stowed[key]
        assert first + len(parts) <= len(place.hosted[key]) * place.shares[key].parts
        if begun:
            damaged = not self._choose(16)
            if damaged:
                reason = f"a KV block came to {place.name} damaged (seal mismatch)"
                self.broken.add((home.name, key, reason))
            else:
                stowed += parts
            self.tell(place, events.ShipmentStored(key, home.name, len(stowed), damaged))
            return
        assert first <= len(stowed), "it has a gap"
        self.pending.insert(0, ((home.name, place.name), place, freight._replace(begun=True)))
        if first < len(stowed):
            del stowed[first:]
            self.tell(place, events.ShipmentStored(key, home.name, first))

    def _comes_home(self, home: Place, freight: Homeward) -> None:
        """The holder may have let go of it meanwhile, and home of what it is for."""
        key, holder, numbers = freight
        reclaim = home.coming.get(key)
        if reclaim is None or reclaim.holder != holder.name:
            return
        assert len(numbers) == len(reclaim.blocks)
        there = [part.number for part in holder.stowed.get(key, ())]
        whole = there[-len(numbers) :] == numbers and bool(self._choose(6))
        del home.coming[key]
        if whole:
            home.content[key] |= dict(zip(reclaim.blocks, numbers, strict=True))
        self.tell(home, events.Reclaimed(key, whole))

    def _rekey(self, place: Place, rekey: events.Rekey) -> None:
        """It does not know of what tokens it has KV; here that is known."""
        key, old = rekey.key, rekey.old
        place.hosted[key], place.homes[key] = place.hosted.pop(old), {rekey.peer}
        stowed = place.stowed.pop(old) if place.shares.pop(old) == rekey.share else []
        del place.homes[old]
        assert rekey.num_blocks == len(stowed)
        known = self.asked[key].num_tokens // SIZE
        place.shares[key] = rekey.share
        place.stowed[key] = [part if part.number < known else part._replace(number=VOID) for part in stowed]

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
                if (place.name, holder) in self.cut:
                    return  # what comes of it is for nobody
                assert holder in place.lines, "it cannot be asked"
                if self.asked[piece.request].over and piece.request not in self.places[holder].stowed:
                    return  # another attempt has it: nobody hears what comes of this one
                there = self.places[holder].stowed[piece.request]
                found = there[: holding.num_blocks]
                expected = [Part(count + at, part, len(holding.holders)) for at in range(holding.num_blocks)]
                assert found == expected, "KV lies elsewhere than is said"
            count += holding.num_blocks
        assert count * SIZE <= piece.start, "what is computed is not at home"
        assert (count + len(piece.blocks)) * SIZE >= piece.start + piece.count, "tokens without a block"
        shipping = place.shipping.get(piece.request)
        shipped = shipping.blocks if shipping is not None else ()
        assert piece.blocks[: len(shipped)] == shipped, "what is shipped was let go of before it was there"
        coming = place.coming.get(piece.request)
        assert coming is None or not set(coming.blocks) & set(piece.blocks), "what is not back is attended to"

    def _give(self, place: Place, give: events.Give) -> None:
        if (place.name, give.peer) in self.cut:
            return
        target = self.places[give.peer]
        fetch = target.fetching.pop(give.key, None)
        if fetch is not None:
            self._later(give.peer, Came(fetch, give.stop))

    def _end_fetch(self, place: Place, key: RequestId) -> None:
        fetch = place.fetching.pop(key, None)
        if fetch is not None:
            self._later(place.name, Came(fetch, fetch.start))

    def _release(self, place: Place, key: RequestId) -> None:
        for books in (place.sending, place.loading):
            books.pop(key, None)
        place.offered.discard(key)
        place.receiving.discard(key)
        place.shipping.pop(key, None)
        if place.coming.pop(key, None) is not None:  # nothing more is written there
            self._later(place.name, events.Reclaimed(key, whole=False))
        self._end_fetch(place, key)

    def _failed(self, place: Place, report: RequestFailed) -> None:
        asked = self.asked.get(key_of(report.request, report.attempt))
        assert self._is_true(place, report, asked), f"why does it say {report.reason!r}?"
        if asked is not None and not asked.over:
            self._end(asked, f"failed: {report.reason}")

    def _is_true(self, place: Place, report: RequestFailed, asked: Asked | None) -> bool:
        """Whether what a node says of an attempt that it gave up is so."""
        key, reason = key_of(report.request, report.attempt), report.reason.removeprefix(f"{place.name}: ")
        if (place.name, key, reason) in self.broken:
            return True
        assert asked is not None
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
            self._later(name, events.DropAttempt(asked.key))

    # Runs.

    def _found(self, place: Place, load: events.LoadBlocks) -> int:
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
                self.tell_missing(place, events.Missing(piece.request, found))
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
        fact = events.Sampled(tuple([asked.key for asked in sampled]), tuple([asked.key for asked in ended]))
        early = self._choose(2)
        if early:
            self.tell(place, fact)
        self.tell(place, Stepped(1))
        if not early:
            self.tell(place, fact)
        for asked in ended:
            self._end(asked, "finished")

    def tell_missing(self, place: Place, missing: events.Missing) -> None:
        place.loading.pop(missing.key, None)
        states = place.node.scheduler.limits.state_blocks
        expected = [events.Shorten(missing.key, 0 if states else missing.num_blocks * SIZE)]
        shorten, *reports = place.node.on(missing, self.now)
        assert [shorten] == expected
        for report in reports:
            assert isinstance(report, MemoryUsed | events.Wake)
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
