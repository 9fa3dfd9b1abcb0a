"""A world in which some prompts are assembled from others' KV, with books of its own of what they may use and leave.

Whether a prompt is assembled is decided here a second time, from the bytes that lie at its node when the last of its
donors came: then it is, as long as none is lost, in one piece; else all that is not cached is computed, or the attempt
is over, if its decode node waits for what is packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from isthmus.core.attempts import Assembly, MemoryEntry, MemoryUsed, RequestFailed, key_of
from isthmus.core.node import events
from isthmus.core.node.letters import HandoverSpan
from isthmus.core.reuse import Packing
from isthmus.core.scheduler import Admitted, Piece, Preempted, Stepped
from isthmus.core.types import BlockName, NodeId, RequestId, Role

from .world import SIZE, Asked, Place, World

CANNOT = "it cannot be assembled of its donors' KV"


class Fate(Enum):
    """COMING: donors are fetched. HERE: all lie here, and it waits or is being assembled. ASSEMBLED: once, and what
    follows builds on that. AS_EVER: it is computed like any other."""

    COMING = auto()
    HERE = auto()
    ASSEMBLED = auto()
    AS_EVER = auto()


class Book:
    """Of an attempt that is to be assembled, at its prefill node. `kept`: donors' blocks that must stay; `cached`:
    tokens that needed no computing; `exact`: blocks that are what their names say; `blocks`, `scratch`: of the piece
    that assembled it."""

    def __init__(self, asked: Asked, assembly: Assembly) -> None:
        self.asked, self.assembly = asked, assembly
        self.fate = Fate.COMING
        self.kept: set[BlockName] = set()
        self.cached = self.exact = 0
        self.load: events.LoadBlocks | None = None
        self.blocks: tuple[int, ...] = ()
        self.scratch: tuple[int, ...] = ()

    @property
    def is_handed_over(self) -> bool:
        return self.asked.route.prefill != self.asked.route.decode

    @property
    def is_sent_packed(self) -> bool:
        return self.is_handed_over and self.packing is not None

    @property
    def packing(self) -> Packing | None:
        return self.assembly.packing

    @property
    def needed(self) -> set[BlockName]:
        """All blocks of its donors, and those before them."""
        return {name for donor in self.assembly.donors for name in donor.names}


class AssembledWorld(World):
    """`seen`: how often what came up."""

    def __init__(self, places: list[Place], choose: Callable[[int], int]) -> None:
        super().__init__(places, choose)
        self.books: dict[tuple[NodeId, RequestId], Book] = {}
        self.extents: dict[RequestId, HandoverSpan] = {}
        self.seen: Counter[str] = Counter()

    def die(self, name: NodeId) -> list[Asked]:
        self.books = {at: book for at, book in self.books.items() if at[0] != name}
        return super().die(name)

    # What is told.

    def tell(self, place: Place, fact: Any) -> None:
        if isinstance(fact, events.StartAttempt) and fact.part is not Role.DECODE:
            self._begin(place, fact)
        super().tell(place, fact)
        self._gather(place, fact)
        self._check(place)

    def _begin(self, place: Place, begin: events.StartAttempt) -> None:
        assembly = self._assembly(self.asked[begin.key])
        if assembly is not None:
            book = self.books[place.name, begin.key] = Book(self.asked[begin.key], assembly)
            if not self._can(place, book):
                book.fate = Fate.AS_EVER
            elif not any(donor.fetch is not None for donor in assembly.donors):
                self._decide(place, book)

    def _assembly(self, asked: Asked) -> Assembly | None:
        """Both of its nodes know it by the route alone."""
        route, assembly = asked.route, asked.route.assembly
        if assembly is None or route.holdings or (assembly.packing is not None and route.handover_start):
            return None
        return assembly

    @staticmethod
    def _can(place: Place, book: Book) -> bool:
        """Whether anything is ever assembled there, and of this length."""
        num_blocks, tiers, state_blocks, stages, _ = place.made
        wanted = sum(len(donor.names) - donor.first for donor in book.assembly.donors)
        scratch = max(wanted, book.packing.num_packed if book.packing is not None else 0)
        fits = -(-book.asked.num_tokens // SIZE) + scratch <= num_blocks
        return tiers is not None and not state_blocks and stages == 1 and fits

    def _decide(self, place: Place, book: Book) -> None:
        """No more of its donors comes."""
        complete = book.needed <= place.dram | place.disk
        book.fate = Fate.HERE if complete else Fate.AS_EVER
        book.kept = book.needed if complete else set()
        fetched = any(donor.fetch is not None for donor in book.assembly.donors)
        self.seen[("came" if fetched else "is here") if complete else "is not here"] += 1

    def _gather(self, place: Place, fact: Any) -> None:
        """After a fetch: what is here now is what counts, since nothing of what came was dropped within the fact."""
        if not isinstance(fact, events.BlocksFetched):
            return
        owner = RequestId(fact.key.partition("~")[0])
        book = self.books.get((place.name, owner))
        if book is not None and book.fate is Fate.COMING and not self._waits(place, owner):
            self._decide(place, book)

    @staticmethod
    def _waits(place: Place, owner: RequestId) -> bool:
        return any(key.startswith(f"{owner}~") for key in place.ordered)

    def lose(self, name: NodeId, block: BlockName) -> None:
        before = self.places[name].dram | self.places[name].disk
        if block in before:
            self.seen["lost"] += 1
            for at, book in self.books.items():  # and what follows it goes with it
                if at[0] == name and block in book.kept:
                    book.kept = set()
        super().lose(name, block)

    def _to_read(self, place: Place, fact: Any) -> list[tuple[BlockName, ...]]:
        if isinstance(fact, events.StartAttempt):
            book = self.books.get((place.name, fact.key))
            if book is not None and book.fate is Fate.AS_EVER and book.is_sent_packed:
                return []  # it is over at once
        return super()._to_read(place, fact)

    # What is answered.

    def _carry_out(self, place: Place, action: Any) -> None:
        match action:
            case events.OfferHandover() | events.ReceiveHandover():
                self._extent(action.key, action.extent)
                if isinstance(action, events.ReceiveHandover):
                    self._receives(action)
            case Admitted():
                book = self.books.get((place.name, action.request))
                if book is not None:
                    self._admitted(place, book, action)
            case events.LoadBlocks():
                self._load(place, action)
            case events.Fetch() if "~" in action.key:
                book = self.books[place.name, RequestId(action.key.partition("~")[0])]
                assert book.fate is Fate.COMING, "donors are fetched that are of no use"
            case events.SaveBlocks():
                self._save(place, action)
            case Preempted():
                self._preempted(place, action.request)
            case MemoryUsed():
                for entry in action.entries:
                    self._entry(place, entry)
            case _:
                pass
        super()._carry_out(place, action)

    def _extent(self, key: RequestId, extent: HandoverSpan) -> None:
        """Both sides mean the same, and what is dropped is not in it."""
        asked = self.asked[key]
        assembly, start = self._assembly(asked), asked.route.handover_start
        if assembly is not None and assembly.packing is not None:
            start = assembly.packing.num_dropped
        assert (extent.start, extent.num_tokens) == (start * SIZE, asked.num_tokens)
        assert self.extents.setdefault(key, extent) == extent, "its nodes do not mean the same"

    def _receives(self, receive: events.ReceiveHandover) -> None:
        assembly = self._assembly(self.asked[receive.key])
        dropped = assembly.packing.num_dropped if assembly is not None and assembly.packing is not None else 0
        real = receive.blocks[dropped:]
        assert receive.blocks[:dropped] == (0,) * dropped and len(set(real)) == len(real)
        if receive.extent.stop == receive.extent.num_tokens:  # it has no states
            assert len(real) == -(-(self.asked[receive.key].num_tokens + 1) // SIZE) - dropped

    def _admitted(self, place: Place, book: Book, admitted: Admitted) -> None:
        if book.fate is Fate.COMING:  # the last came with this fact
            assert not self._waits(place, book.asked.key), "it is computed before its donors came"
            self._decide(place, book)
        book.cached, book.blocks = admitted.cached_tokens, admitted.blocks
        computed = book.asked.num_tokens if book.fate is Fate.ASSEMBLED else book.cached  # pre-empted since
        book.exact = computed // SIZE

    def _load(self, place: Place, load: events.LoadBlocks) -> None:
        book = self.books.get((place.name, load.key))
        if book is None or load.told or place.made[2]:
            return  # with recurrent states nothing is assembled
        count = -(-book.cached // SIZE)
        donated = () if book.fate is Fate.AS_EVER or book.fate is Fate.ASSEMBLED else tuple(
            name for donor in book.assembly.donors for name in donor.names[donor.first :]
        )  # fmt: skip
        assert load.names == book.asked.names[:count] + donated
        assert load.blocks[:count] == book.blocks[:count]
        if donated:
            book.load, book.scratch = load, load.blocks[count:]
            assert not set(book.scratch) & set(book.blocks) and len(set(book.scratch)) == len(donated)

    def _save(self, place: Place, save: events.SaveBlocks) -> None:
        """What does not follow from its tokens alone has no name."""
        asked = self.asked.get(save.request)
        if asked is None or self._assembly(asked) is None:
            return
        book = self.books.get((place.name, save.request))
        assert book is not None, "what was assembled elsewhere gets names"
        if book.fate is not Fate.AS_EVER:
            assert set(save.names) <= set(asked.names[: book.exact]), "what is assembled gets names"
            numbers = [asked.names.index(name) for name in save.names]
            assert [place.content[save.request][block] for block in save.blocks] == numbers
            self.seen["saved again"] += 1

    def _preempted(self, place: Place, key: RequestId) -> None:
        book = self.books.get((place.name, key))
        if book is not None:
            self.seen[f"preempted {book.fate.name}"] += 1
            book.load, book.scratch = None, ()

    def _entry(self, place: Place, entry: MemoryEntry) -> None:
        """What is packed is never to be lent, and what was dropped lies nowhere."""
        assert all(holding.holders for holding in entry.holdings)
        key = key_of(entry.request, entry.attempt)
        assembly, book = self._assembly(self.asked[key]), self.books.get((place.name, key))
        as_ever = book is not None and book.fate is Fate.AS_EVER
        if assembly is not None and assembly.packing is not None and not as_ever:
            assert not entry.decodes, "what is packed may not move"

    def _is_true(self, place: Place, report: RequestFailed, asked: Asked | None) -> bool:
        reason = report.reason.removeprefix(f"{place.name}: ")
        if asked is None:
            return super()._is_true(place, report, asked)
        assembly = self._assembly(asked)
        if reason == CANNOT:
            self.seen["failed"] += 1
            book = self.books[place.name, asked.key]
            gone = not book.kept <= place.dram | place.disk or not book.needed <= place.dram | place.disk
            short = book.load is not None and self._found(place, book.load) < len(book.load.names)
            assert book.is_sent_packed
            return gone or short or not self._can(place, book)
        if reason == "others needed its memory" and assembly is not None and assembly.packing is not None:
            assert report.no_room, "it is to be tried again when there is memory"
            self.seen["dropped"] += 1
            return True
        return super()._is_true(place, report, asked)

    # Runs.

    def _attends(self, place: Place, piece: Piece) -> None:
        super()._attends(place, piece)
        asked = self.asked[piece.request]
        if piece.request not in place.node:
            return  # it is over, and the run was out
        assembly, book = self._assembly(asked), self.books.get((place.name, piece.request))
        packing = assembly.packing if assembly is not None else None
        if piece.assembly is not None:
            assert book is not None
            self._assembles(place, piece, book)
        elif book is None:  # where it decodes, and came packed or not; or it is no such prompt
            self._decodes(piece, packing)
        elif book.fate is Fate.AS_EVER or packing is None:
            assert piece.packing is None and not piece.remote
        else:
            assert book.fate is Fate.ASSEMBLED, "it was to be assembled"
            self._decodes(piece, packing)
            kept = book.scratch[: packing.num_packed] + book.blocks[packing.num_blocks :]
            assert piece.blocks[: len(kept)] == kept, "what was packed lies elsewhere"

    def _assembles(self, place: Place, piece: Piece, book: Book) -> None:
        """Once, in one piece, from blocks that are its own and hold what was loaded."""
        assert book.fate is Fate.HERE and book.load is not None, "it is assembled out of turn"
        assert (piece.start, piece.samples) == (book.cached, True)
        assert piece.start + piece.count == book.asked.num_tokens and not book.asked.generated
        assert piece.blocks == book.blocks and piece.scratch[: len(book.scratch)] == book.scratch
        assert set(book.load.names) <= place.dram | place.disk
        size = max(len(book.scratch), book.packing.num_packed if book.packing is not None else 0)
        assert len(piece.scratch) == size
        run = place.run
        assert run is not None and run.steps == 1
        mine = set(piece.scratch + piece.blocks)
        assert len(mine) == len(piece.scratch + piece.blocks)
        for other in run.pieces:
            if other.request != piece.request:
                assert not mine & set(other.blocks + other.scratch), "blocks of two requests"
        book.fate, book.scratch, book.kept = Fate.ASSEMBLED, piece.scratch, set()
        self.seen["packed" if book.packing is not None else "assembled"] += 1
        self.seen["handed over" if book.is_handed_over else "here"] += 1

    @staticmethod
    def _decodes(piece: Piece, packing: Packing | None) -> None:
        assert piece.packing == packing
        if packing is not None:
            assert not piece.remote and piece.num_absent == packing.num_dropped

    def tell_missing(self, place: Place, missing: events.Missing) -> None:
        book = self.books.get((place.name, missing.key))
        if book is None or book.fate is Fate.AS_EVER or missing.key not in place.node:
            super().tell_missing(place, missing)
            return
        assert book.fate is Fate.HERE or book.fate is Fate.ASSEMBLED
        actions, num_blocks = place.node.on(missing, self.now), missing.num_blocks
        if book.fate is Fate.HERE:
            self.seen["missing"] += 1
            if book.is_sent_packed:
                assert any(isinstance(action, RequestFailed) for action in actions)
                assert not any(isinstance(action, events.Shorten) for action in actions)
            num_blocks = min(num_blocks, book.cached // SIZE)
        shortens = [action for action in actions if isinstance(action, events.Shorten)]
        assert all(action == events.Shorten(missing.key, num_blocks * SIZE) for action in shortens)
        assert len(shortens) + sum(isinstance(action, RequestFailed) for action in actions) == 1
        for action in actions:
            assert isinstance(
                action, events.Shorten | RequestFailed | events.EndFetch | events.Cut | MemoryUsed | events.Wake
            )
            self._carry_out(place, action)
        if book.fate is Fate.HERE:
            book.fate, book.kept = Fate.AS_EVER, set()
        place.loading.pop(missing.key, None)
        self.tell(place, Stepped(0))

    # What holds after every fact.

    def _check(self, place: Place) -> None:
        here, tiers = place.dram | place.disk, place.node.tiers
        for (name, key), book in self.books.items():
            if name != place.name or key not in place.node:
                continue
            assert book.kept <= here, "a donor of a prompt that waits went"
            assert tiers is None or all(name in tiers._pins for name in book.kept)
            if book.fate is Fate.ASSEMBLED and place.run is None and book.packing is not None:
                attempt = place.node._attempts[key]
                kept = book.scratch[: book.packing.num_packed] + book.blocks[book.packing.num_blocks :]
                assert attempt.blocks[: len(kept)] == kept and not attempt.scratch
