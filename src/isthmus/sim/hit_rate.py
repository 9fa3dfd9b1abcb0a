"""How much of a workload's prompts one pool of a given size finds cached, by policy, and at best.

Time plays no part here: each prompt is looked up and then stored before the next one comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import msgspec

from isthmus.errors import ConfigError
from isthmus.scheduler.eviction import EVICTIONS
from isthmus.scheduler.tiers import TierCache
from isthmus.types import BlockName

OPTIMUM = "optimum"
POLICIES = (*EVICTIONS, OPTIMUM)

Prompt = tuple[int, Sequence[BlockName]]
"""Length in tokens, and the names of its blocks, the last of which may be partial."""


class HitRate(msgspec.Struct, frozen=True):
    """Shares of what was asked for, 0 when nothing was."""

    blocks: float
    tokens: float
    mean: float
    """Of the requests' shares of tokens."""


def hit_rate(
    prompts: Sequence[Prompt],
    capacity: int | None,
    policy: str,
    *,
    block_size: int = 512,
    warmup: float = 0.0,
) -> HitRate:
    """Of one pool of `capacity` blocks (None: no limit), which holds no block without its head.

    The first `warmup` share of the requests fills the pool and is not counted. A hit on a partial last block
    counts as the tokens it holds. `policy` is one of `POLICIES`; raises `ConfigError` for another.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no eviction policy is called {policy!r}: choose one of {', '.join(POLICIES)}")
    chains = [names for _, names in prompts]
    room = sum(map(len, chains)) if capacity is None else capacity
    hits = optimal_hits(chains, room) if policy == OPTIMUM else policy_hits(chains, room, policy)
    counted = list(zip(prompts, hits, strict=True))[int(warmup * len(prompts)) :]
    num_blocks = sum(len(names) for (_, names), _ in counted)
    num_tokens = sum(tokens for (tokens, _), _ in counted)
    cached = [min(found * block_size, tokens) for (tokens, _), found in counted]
    shares = [found / tokens for ((tokens, _), _), found in zip(counted, cached, strict=True) if tokens]
    return HitRate(
        blocks=sum(found for _, found in counted) / num_blocks if num_blocks else 0.0,
        tokens=sum(cached) / num_tokens if num_tokens else 0.0,
        mean=sum(shares) / len(shares) if shares else 0.0,
    )


def policy_hits(chains: Sequence[Sequence[BlockName]], capacity: int, eviction: str) -> Iterator[int]:
    """Blocks found of each chain in turn, under a policy that does not know what will come."""
    cache = TierCache(capacity, eviction=eviction)
    for names in chains:
        yield cache.match(names)[0]
        cache.put(names)


def optimal_hits(chains: Sequence[Sequence[BlockName]], capacity: int) -> Iterator[int]:
    """Blocks found of each chain in turn, when the most are found that can be with `capacity` blocks.

    After each request the pool keeps those of its blocks, old and new, that are needed soonest: the rule of
    L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with leave not to take
    a block in. Keeping a block from one use to its next is an interval. As many as possible are wanted, no more
    than `capacity` at any time, and for that the interval to drop is the one that ends last. A head is needed
    no later than its tail, so with ties broken by depth the pool is closed under prefixes by itself.
    """
    next_uses = _next_uses(chains)
    due: dict[BlockName, int] = {}  # held block -> index of the chain that needs it next
    latest: list[tuple[int, int, BlockName]] = []  # heap of (-due, -depth, name); one past its due comes last
    for names, needed in zip(chains, next_uses, strict=True):
        found = 0
        for depth, (name, need) in enumerate(zip(names, needed, strict=True)):
            if due.pop(name, None) is not None and found == depth:
                found += 1
            if need < len(chains):
                due[name] = need
                heappush(latest, (-need, -depth, name))
        while len(due) > capacity:
            del due[heappop(latest)[2]]
        yield found


def _next_uses(chains: Sequence[Sequence[BlockName]]) -> list[list[int]]:
    """For each block of each chain the index of the next chain that has it, or the number of chains."""
    following: dict[BlockName, int] = {}
    needed = []
    for index in range(len(chains) - 1, -1, -1):
        names = chains[index]
        needed.append([following.get(name, len(chains)) for name in names])
        following.update(dict.fromkeys(names, index))
    needed.reverse()
    return needed
