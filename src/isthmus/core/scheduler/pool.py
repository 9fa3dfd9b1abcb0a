"""The paged pool: which blocks are free, held, or cached under a name.

    free ──allocate──> held ──release, unnamed──> free
                        │ ▲
         release, named │ │ acquire by name
                        ▼ │
                       idle ──evict (least recently used, of the tenant most above its share)──> free

Two categories of held blocks (Prefill-as-a-Service, hybrid prefix cache pool): *prefix-cache* blocks are full, may
get a name, and stay in the cluster; *transfer-cache* blocks (the unfinished block and the recurrent state at a
prompt's end, on their way to another node) never get a name, and are free after the transfer
(`Scheduler.num_transfer`).

Owns block numbers and reference counts; knows nothing of requests or tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from isthmus.core.types import NOBODY, BlockName, Tenant

Blocks = tuple[int, ...]
"""Numbers of blocks, in the order of the tokens whose KV they hold."""
MAX_INSERTIONS = 16
"""Most single insertions into the list of free blocks; more blocks are sorted in, which costs as much as some."""


class _Share:
    """One tenant's named blocks: how many, and the idle ones, least recently used first."""

    __slots__ = ("idle", "num_named", "weight")

    def __init__(self, weight: float) -> None:
        self.weight, self.num_named = weight, 0
        self.idle: OrderedDict[int, None] = OrderedDict()


class BlockPool:
    """Blocks `0 .. num_blocks-1`. `available` counts free and idle blocks: all that can be allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks))  # sorted, so that runs of blocks are found
        self._references: dict[int, int] = {}
        self._name_of: dict[int, BlockName] = {}
        self._block_of: dict[BlockName, int] = {}
        self._nobodys = _Share(NOBODY.weight)
        self._shares = {NOBODY.name: self._nobodys}
        self._share_of: dict[int, _Share] = {}  # of named blocks that are somebody's
        self._num_idle = 0
        self.evicted: list[BlockName] = []
        """Names evicted since `take_evicted`."""

    @property
    def available(self) -> int:
        return len(self._free) + self._num_idle

    @property
    def cached(self) -> int:
        """Number of named blocks, held or idle."""
        return len(self._name_of)

    @property
    def num_held(self) -> int:
        """References to blocks: one that two requests share counts twice."""
        return sum(self._references.values())

    def holds(self, name: BlockName) -> bool:
        return name in self._block_of

    def match(self, names: Iterable[BlockName]) -> Blocks:
        """Blocks of the longest cached prefix of `names`. Does not mutate."""
        found = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are idle, so that acquiring them lowers `available`."""
        return sum(block in self._share_of.get(block, self._nobodys).idle for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each cached block."""
        for block in blocks:
            idle = self._share_of.get(block, self._nobodys).idle
            if block in idle:
                del idle[block]
                self._num_idle -= 1
            self._references[block] = self._references.get(block, 0) + 1

    def allocate(self, count: int, *, after: int | None = None) -> Blocks:
        """Allocates `count` blocks with one reference each, of consecutive numbers if there are such; one block `after`
        another if that is free. Needs `count <= available`."""
        assert 0 <= count <= self.available, "callers check `available` first"
        self._make_free(count)
        if after is not None and count == 1:
            at = bisect_left(self._free, after + 1)
            if at < len(self._free) and self._free[at] == after + 1:
                return self._take(at, 1)
        return self._take(self._find_run(count), count)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference each. The tail becomes evictable before the head."""
        unnamed = []
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left:
                self._references[block] = left
                continue
            del self._references[block]
            if block in self._name_of:
                self._share_of.get(block, self._nobodys).idle[block] = None
                self._num_idle += 1
            else:
                unnamed.append(block)
        self._put_back(unnamed)

    def store(self, block: int, name: BlockName, tenant: Tenant = NOBODY) -> bool:
        """Caches a held block under `name`, in the tenant's share; False when another block has that name already."""
        assert block in self._references, "only held blocks are named"
        if name in self._block_of or block in self._name_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        share = self._nobodys
        if tenant.name:
            if tenant.name not in self._shares:
                self._shares[tenant.name] = _Share(tenant.weight)
            share = self._share_of[block] = self._shares[tenant.name]
            share.weight = tenant.weight
        share.num_named += 1
        return True

    def sizes(self) -> dict[str, int]:
        """Named blocks of each tenant. Does not mutate."""
        return {name: share.num_named for name, share in self._shares.items()}

    def take_evicted(self) -> tuple[BlockName, ...]:
        """Names evicted since the last call."""
        names, self.evicted = tuple(self.evicted), []
        return names

    def check(self) -> None:
        """Conservation: every block is exactly one of free, held, idle; names map one to one."""
        shares = self._shares.values()
        free, held = set(self._free), set(self._references)
        idle = {block for share in shares for block in share.idle}
        assert self._num_idle == len(idle) == sum([len(share.idle) for share in shares])
        assert len(self._name_of) == sum([share.num_named for share in shares])
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & held or free & idle or held & idle), "a block is in two states"
        assert len(free) + len(held) + len(idle) == self.num_blocks, "blocks were lost or invented"
        assert all(count > 0 for count in self._references.values())
        assert {block: name for name, block in self._block_of.items()} == self._name_of
        assert idle <= set(self._name_of), "an idle block has no name"
        assert not free & set(self._name_of), "a free block has a name"

    def _put_back(self, blocks: list[int]) -> None:
        """Makes blocks free. Each insertion moves the rest of the list, megabytes in a large pool: blocks that go
        between the same two are inserted at once, and many others sorted in."""
        free, done = self._free, 0
        blocks.sort()
        for _ in range(MAX_INSERTIONS):
            if done == len(blocks):
                return
            at = bisect_left(free, blocks[done])
            stop = bisect_left(blocks, free[at], done) if at < len(free) else len(blocks)
            free[at:at] = blocks[done:stop]
            done = stop
        free += blocks[done:]
        free.sort()

    def _make_free(self, count: int) -> None:
        evicted = []
        for _ in range(count - len(self._free)):
            share = self._nobodys
            if len(self._shares) > 1:
                share = max([each for each in self._shares.values() if each.idle], key=_level)
            block, _ = share.idle.popitem(last=False)
            share.num_named -= 1
            self._num_idle -= 1
            self._share_of.pop(block, None)
            name = self._name_of.pop(block)
            del self._block_of[name]
            self.evicted.append(name)
            evicted.append(block)
        self._put_back(evicted)

    def _find_run(self, count: int) -> int:
        """Index in the free list where `count` consecutive numbers start, else the longest run."""
        free, best, best_length, start = self._free, 0, 0, 0
        for at in range(1, len(free) + 1):
            if at < len(free) and free[at] == free[at - 1] + 1:
                if at - start + 1 < count:
                    continue
                return start
            if at - start >= count:
                return start
            if at - start > best_length:
                best, best_length = start, at - start
            start = at
        return min(best, len(free) - count)

    def _take(self, at: int, count: int) -> Blocks:
        blocks = tuple(self._free[at : at + count])
        del self._free[at : at + count]
        for block in blocks:
            self._references[block] = 1
        return blocks


def _level(share: _Share) -> float:
    return share.num_named / share.weight


class CountingPool:
    """A `BlockPool` that only counts, without block numbers or names: for simulated memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.available = num_blocks
        self.cached = 0
        self.evicted: list[BlockName] = []

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.available

    def holds(self, name: BlockName) -> bool:
        return False

    def match(self, names: Iterable[BlockName]) -> Blocks:
        return ()

    def idle_among(self, blocks: Iterable[int]) -> int:
        return 0

    def acquire(self, blocks: Iterable[int]) -> None:
        """Does nothing, since nothing is ever matched."""

    def allocate(self, count: int, *, after: int | None = None) -> Blocks:
        assert 0 <= count <= self.available, "callers check `available` first"
        self.available -= count
        return (0,) * count

    def release(self, blocks: Sequence[int]) -> None:
        self.available += len(blocks)

    def store(self, block: int, name: BlockName, tenant: Tenant = NOBODY) -> bool:
        return False

    def sizes(self) -> dict[str, int]:
        return {}

    def take_evicted(self) -> tuple[BlockName, ...]:
        return ()

    def check(self) -> None:
        assert 0 <= self.available <= self.num_blocks


Pool = BlockPool | CountingPool
