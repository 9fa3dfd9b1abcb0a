"""Carries out what a node's scheduler decides about its cache: which blocks are kept, in which tier, which go.

Called by whoever drives the scheduler; the bytes move in the cache's own threads. An engine's blocks that are still
being saved stay allocated until that is done, whatever became of their request.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.blocks import BlockNamer, KVLayout
from isthmus.cluster.cache import Load, NodeCache, Staging, prefix_with_state
from isthmus.cluster.fetches import Fetch
from isthmus.cluster.messages import Begin
from isthmus.scheduler import BlockPool, Event, Evicted, Lost, Piece, Released, Stored, TierCache
from isthmus.types import BlockName, RequestId, Tier

MAX_NAMERS = 64
NOBODY = RequestId("")

Held = tuple[Sequence[BlockName], Sequence[int]]
"""Names of a prompt's blocks, and the engine's blocks that hold their KV."""


class Keeper:
    """`decide`: tells the scheduler; `post`: calls something later, when the scheduler may be told."""

    def __init__(
        self, revision: str, layout: KVLayout, pool: BlockPool, tiers: TierCache, cache: NodeCache
    ) -> None:
        self._tiers = tiers
        self._revision, self._layout, self._pool, self.cache = revision, layout, pool, cache
        self._namers: OrderedDict[str, BlockNamer] = OrderedDict()
        self._held: list[Held] = []
        self._staged: list[Staging] = []
        self._wanted: dict[BlockName, tuple[BlockName | None, int]] = {}
        self._demoted: list[BlockName] = []
        """Of those that are wanted: room for them is made before they are saved, and these go on to disk after."""
        self.decide: Callable[[Event], None]
        self.post: Callable[[Callable[[], None]], None]

    def load(
        self,
        names: tuple[BlockName, ...],
        blocks: tuple[int, ...],
        tokens: int,
        state: tuple[int, ...],
        fetch: Fetch | None,
    ) -> Load:
        """Brings the blocks of the first `tokens` tokens into the engine, and the recurrent state after them into the
        blocks `state`."""
        self._save()  # what it may wait for is on its way first
        count = self._layout.blocks_for(tokens)
        wanted = prefix_with_state(self._layout, names, count) if state else names[:count]
        if fetch is not None and wanted != tuple(fetch.names[: len(wanted)]):
            # It ended early, or is for more than is of use: what lies there is not this prefix and its state.
            fetch.release()
            fetch = None
        return self.cache.load(wanted, blocks[:count] + state, fetch)

    def names(self, begin: Begin, tokens: Sequence[int], num_computed: int) -> tuple[BlockName, ...]:
        """Of all full blocks of a request, generated ones included."""
        size, known = self._layout.block_size, begin.names
        full = num_computed // size
        if full <= len(known):
            return known[:full]
        namer = self._namers.get(begin.salt)
        if namer is None:
            namer = BlockNamer(revision=self._revision, layout=self._layout, salt=begin.salt)
            self._namers[begin.salt] = namer
            if len(self._namers) > MAX_NAMERS:
                self._namers.popitem(last=False)
        parent = known[-1] if known else None
        assert parent is None or isinstance(parent, bytes)
        return (*known, *namer.names(tokens[: full * size], parent=parent, start=len(known) * size))

    def stage(self, names: Sequence[BlockName], piece: Piece) -> Staging | None:
        """Makes room for the blocks that a chunk will complete."""
        size = self._layout.block_size
        full = range(piece.start // size, min((piece.start + piece.count) // size, len(names)))
        new = [at for at in full if not self.cache.store.contains(names[at])]
        if not new:
            return None
        return self.cache.stage([names[at] for at in new], [piece.blocks[at] for at in new])

    @contextlib.contextmanager
    def holding(self, held: list[Held], staged: list[Staging]) -> Iterator[None]:
        """While the scheduler is told that requests are computed or over: their KV is still where it was, so that
        what is to be kept of it can be saved. `staged`: blocks of theirs that are on their way already."""
        self._held, self._staged = held, staged
        for _, blocks in held:
            self._pool.acquire(blocks)
        yield
        self._held = []
        self._save()
        for staging in self._staged:
            self.cache.unstage(staging)
        self._staged = []
        for _, blocks in held:
            self._pool.release(blocks)
        if held:
            self.decide(Released(NOBODY))  # somebody may have waited for the blocks

    def act(self, action: Stored | Evicted) -> None:
        if isinstance(action, Evicted):
            for name in action.names:
                self._wanted.pop(name, None)
            self.cache.drop(action.names)
        elif action.tier is Tier.DISK:
            self._demoted += [name for name in action.names if name in self._wanted]
            self.cache.demote([name for name in action.names if name not in self._wanted])
        else:
            self._keep(action.names)

    def _keep(self, names: Sequence[BlockName]) -> None:
        """Wants these blocks saved from the engine. Those it does not hold are in the store already, or lost."""
        where: dict[BlockName, tuple[BlockName | None, int]] = {}
        for chain, blocks in self._held:
            where.update(zip(chain, zip((None, *chain), blocks, strict=False), strict=False))
        self._wanted |= {name: where[name] for name in names if name in where}
        elsewhere = [name for name in names if name not in where]
        tiers = {name: self.cache.store.tier(name) for name in elsewhere}
        self.cache.promote([name for name, tier in tiers.items() if tier is Tier.DISK])
        lost = tuple([name for name, tier in tiers.items() if tier is None])
        if lost:
            self.post(lambda: self.lost(lost))

    def _save(self) -> None:
        """Saves what is wanted, now that what had to give way is dropped."""
        if self._wanted:
            names = tuple(self._wanted)
            heads, blocks = zip(*self._wanted.values(), strict=True)
            self._pool.acquire(blocks)
            staged, self._staged = self._staged, []
            self.cache.save(
                names, heads, blocks, staged, lambda lost: self.post(lambda: self._saved(blocks, lost))
            )
        if self._demoted:
            self.cache.demote(self._demoted)
        self._wanted, self._demoted = {}, []

    def _saved(self, blocks: Sequence[int], lost: Iterable[BlockName]) -> None:
        self._pool.release(blocks)
        self.lost(tuple(lost))
        self.decide(Released(NOBODY))  # somebody may have waited for the blocks

    def settle(self, names: Sequence[BlockName]) -> None:
        """Drops what is in the store of a prefix and not the scheduler's: it found no room for its end."""
        found, _ = self._tiers.match(names)
        held = (self._tiers.dram.held, self._tiers.ssd.held)
        self.cache.drop([name for name in names[found:] if not any(name in tier for tier in held)])

    def lost(self, names: tuple[BlockName, ...]) -> None:
        """The bytes of these blocks are nowhere, though the scheduler counts on them."""
        if names:
            self.decide(Lost(names))
