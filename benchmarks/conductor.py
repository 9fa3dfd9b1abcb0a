"""`python -m benchmarks conductor`: how long the conductor takes for one decision, `RequestArrived` to `Route`.

A cluster is played around one conductor, in virtual time and without a simulator: queues drain, copies arrive,
answers end, caches fill and evict, and the conductor hears of all of it, as it would live. Only the decisions are
timed one by one; what it takes to hear the rest is summed apart. Block names are 16 bytes, as live, and new objects
in every event, as a decoder makes them. Time is this thread's CPU time, so that what else runs on the machine does
not count.

Python's garbage collector is enabled with its usual thresholds, and its pauses are in the figures. Only what exists
before the first decision is frozen (`gc.freeze`): the books of the played cluster, which caches have what, are many
times larger than all that the collector sees of a conductor, whose index holds nothing that it tracks.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec
from rich.table import Table

from isthmus.bench.policy_cells import CURVE, MEMORY
from isthmus.core.conductor import (
    BlocksEvicted,
    BlocksStored,
    Conductor,
    Event,
    FetchFinished,
    FirstToken,
    NodeJoined,
    Paths,
    PrefillFinished,
    RequestArrived,
    RequestEnded,
    Route,
    Rules,
)
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_MS, NS_PER_S, NodeId, RequestId, Role
from isthmus.lab.sim.spread import nearest_rank

BLOCK_SIZE = 16
NAME_BYTES = 16
OUTPUT_TOKENS = 300
STEP_NS = 30 * NS_PER_MS
NUM_PREFIXES = 50
PREFIX_BLOCKS = (8, 64)
RETURNING = 0.6
"""Share of requests that go on with a conversation; the others begin one, behind a shared prefix."""
COPIES = ((1, 0.7), (2, 0.2), (4, 0.1))
"""On how many nodes a conversation lies, and the share of conversations for which that is so."""
LOAD = 0.85
"""Share of the prefill nodes' time that the requests take if a third of each prompt is cached, about what is."""
PATHS = Paths(network=3_000_000_000, memory=MEMORY)
"""Links slow enough that copies overlap and every decision has some to think of."""


class Load(msgspec.Struct, frozen=True):
    """What the conductor faces: `num_blocks` distinct names in its index, prompts of `prompt_blocks`."""

    num_nodes: int = 100
    num_blocks: int = 1_000_000
    prompt_blocks: int = 250
    num_decisions: int = 20_000
    policy: str = "isthmus"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 2:
            raise ConfigError(f"--nodes {self.num_nodes}: at least 2, so that one can prefill and one decode")
        if self.prompt_blocks <= PREFIX_BLOCKS[1]:
            raise ConfigError(f"--prompt-blocks {self.prompt_blocks}: more than {PREFIX_BLOCKS[1]}")
        if self.num_blocks < 10 * self.prompt_blocks:
            raise ConfigError(f"--blocks {self.num_blocks}: at least ten prompts, {10 * self.prompt_blocks}")
        if self.num_decisions < 1:
            raise ConfigError(f"--decisions {self.num_decisions}: at least 1")


class Timing(msgspec.Struct, frozen=True):
    """One layout's figures. Times of single decisions in microseconds; `follow_up_us`: hearing all that follows
    from one request, in the mean. `queued`, `copying`: requests in prefill and copies under way, in the mean."""

    layout: str
    policy: str
    nodes: int
    indexed_blocks: int
    decisions: int
    decisions_per_s: float
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    follow_up_us: float
    events: int
    queued: float
    copying: float
    fetches: int
    matched_share: float


def run(load: Load, report: Callable[[str], None] = lambda line: None) -> list[Timing]:
    """Half of the nodes prefill and half decode; then all nodes are mixed."""
    half = load.num_nodes // 2
    layouts = {
        f"{half} prefill, {load.num_nodes - half} decode": [Role.PREFILL] * half
        + [Role.DECODE] * (load.num_nodes - half),
        f"{load.num_nodes} mixed": [Role.MIXED] * load.num_nodes,
    }
    found = []
    for layout, roles in layouts.items():
        report(f"{layout}: filling the index")
        played = Cluster(load, roles)
        report(f"{layout}: {played.conductor.view.index.num_blocks:,} blocks indexed, deciding")
        found.append(played.play(layout))
    return found


class _Conversation:
    """The names of its latest prompt, in one piece, which begins with shared prefix number `prefix`."""

    __slots__ = ("names", "number", "prefix")

    def __init__(self, number: int, prefix: int, names: bytes) -> None:
        self.number, self.prefix, self.names = number, prefix, names


class _Cache:
    """One node's blocks: shared prefixes stay, conversations leave whole, the least recently used first."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.conversations: OrderedDict[int, list[bytes]] = OrderedDict()
        self.num_own = self.capacity = 0

    def store(self, conversation: int, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """Adds names, returns those that are new."""
        new = tuple(name for name in names if name not in self.names)
        self.names.update(new)
        self.conversations.setdefault(conversation, []).extend(new)
        self.conversations.move_to_end(conversation)
        self.num_own += len(new)
        return new

    def evict(self) -> tuple[bytes, ...]:
        """The names that leave so that the rest fits."""
        gone: list[bytes] = []
        while self.num_own > self.capacity:
            _, names = self.conversations.popitem(last=False)
            gone += names
            self.num_own -= len(names)
        self.names.difference_update(gone)
        return tuple(gone)


class Cluster:
    """A conductor and just enough around it to feed it every event in time. `play` it once."""

    def __init__(self, load: Load, roles: Sequence[Role]) -> None:
        self._load, self._rng = load, random.Random(load.seed)
        self.conductor = Conductor(Rules(policy=load.policy, max_requests=1 << 40))
        self._prefills = [NodeId(f"n{i}") for i, role in enumerate(roles) if role is not Role.DECODE]
        self._caches = {node: _Cache() for node in self._prefills}
        self._free_ns = dict.fromkeys(self._prefills, 0)
        self._heap: list[tuple[int, int, Event]] = []
        self._numbers = itertools.count()
        self._prefixes: list[bytes] = []
        self._conversations: list[_Conversation] = []
        self._storing: dict[RequestId, tuple[NodeId, int, tuple[bytes, ...]]] = {}
        self._follow_ns = self._num_events = 0
        capacity = 100 * load.prompt_blocks * BLOCK_SIZE
        room = 2 * load.num_blocks // len(self._prefills)
        for number, role in enumerate(roles):
            cached = 0 if role is Role.DECODE else room
            self._hear(
                NodeJoined(NodeId(f"n{number}"), role, capacity, BLOCK_SIZE, CURVE, PATHS, cached), now=0
            )
        self._fill()

    # Before the clock starts.

    def _fill(self) -> None:
        """Conversations on one node or some, each behind a prefix that many share, until the index is full."""
        load, rng, caches = self._load, self._rng, list(self._caches.values())
        self._prefixes = [_fresh(rng, rng.randint(*PREFIX_BLOCKS)) for _ in range(NUM_PREFIXES)]
        num_indexed = 0
        copies, shares = [count for count, _ in COPIES], [share for _, share in COPIES]
        while num_indexed < load.num_blocks:
            conversation = self._begin()
            names = _split(conversation.names)
            num_indexed += len(names) - len(self._prefixes[conversation.prefix]) // NAME_BYTES
            for at in rng.sample(range(len(caches)), min(len(caches), rng.choices(copies, shares)[0])):
                new = caches[at].store(conversation.number, names)
                self._hear(BlocksStored(self._prefills[at], new), now=0)
        for cache in caches:
            cache.capacity = cache.num_own
        self._follow_ns = self._num_events = 0

    def _begin(self) -> _Conversation:
        """A new conversation; the i-th prefix is chosen in proportion to 1 / i."""
        rng = self._rng
        prefix = min(int(len(self._prefixes) ** rng.random()), len(self._prefixes) - 1)
        start = self._prefixes[prefix]
        own = _fresh(rng, self._load.prompt_blocks - len(start) // NAME_BYTES)
        conversation = _Conversation(len(self._conversations), prefix, start + own)
        self._conversations.append(conversation)
        return conversation

    # Playing.

    def play(self, layout: str) -> Timing:
        load, rng, heap = self._load, self._rng, self._heap
        gap_ns = self._mean_gap_ns()
        times: list[int] = []
        queued = copying = fetches = matched = 0
        now = 0
        clock = time.thread_time_ns
        gc.collect()
        gc.freeze()
        view = self.conductor.view
        for number in range(load.num_decisions):
            now += int(rng.expovariate(1.0) * gap_ns)
            while heap and heap[0][0] <= now:
                at, _, event = heappop(heap)
                self._happens(event, at)
            conversation = self._next()
            names = _split(conversation.names)
            event = RequestArrived(
                RequestId(f"r{number}"), "", load.prompt_blocks * BLOCK_SIZE, OUTPUT_TOKENS, names
            )
            begin = clock()
            (route,) = self.conductor.on(event, now)
            times.append(clock() - begin)
            assert isinstance(route, Route)
            self._storing[event.request] = (route.prefill, conversation.number, names)
            self._follow(event, route, now)
            fetches += route.fetch is not None
            matched += route.num_cached
            queued += sum(map(len, (node.prefills for node in view.prefills)))
            copying += sum(len(node.link_in.copies) for node in view.prefills)
        gc.unfreeze()
        times.sort()
        count = len(times)
        return Timing(
            layout=layout,
            policy=load.policy,
            nodes=load.num_nodes,
            indexed_blocks=view.index.num_blocks,
            decisions=count,
            decisions_per_s=count * NS_PER_S / sum(times),
            mean_us=sum(times) / count / 1000,
            p50_us=nearest_rank(times, 50) / 1000,
            p99_us=nearest_rank(times, 99) / 1000,
            max_us=times[-1] / 1000,
            follow_up_us=self._follow_ns / count / 1000,
            events=self._num_events,
            queued=queued / count,
            copying=copying / count,
            fetches=fetches,
            matched_share=matched / count / load.prompt_blocks,
        )

    def _mean_gap_ns(self) -> float:
        node = self.conductor.view.prefills[0]
        cached = self._load.prompt_blocks * BLOCK_SIZE // 3
        return node.cost.prefill_ns(2 * cached, cached) / len(self._prefills) / LOAD

    def _next(self) -> _Conversation:
        """A new conversation, or an old one that goes on from some point with something new."""
        rng = self._rng
        if rng.random() >= RETURNING:
            return self._begin()
        conversation = rng.choice(self._conversations)
        first = len(self._prefixes[conversation.prefix]) // NAME_BYTES
        kept = rng.randint(first, self._load.prompt_blocks - 1)
        conversation.names = conversation.names[: kept * NAME_BYTES] + _fresh(
            rng, self._load.prompt_blocks - kept
        )
        return conversation

    def _follow(self, event: RequestArrived, route: Route, now: int) -> None:
        """What a real cluster would report of this request, each in its time."""
        begins = max(now, self._free_ns[route.prefill])
        done = self._free_ns[route.prefill] = begins + route.work_ns
        if route.fetch is not None:
            self._push(route.fetch.until_ns, FetchFinished(event.request, route.attempt))
        self._push(done, FirstToken(event.request, route.attempt))
        self._push(done + NS_PER_MS, PrefillFinished(event.request, route.attempt))
        self._push(done + OUTPUT_TOKENS * STEP_NS, RequestEnded(event.request, OUTPUT_TOKENS))

    def _push(self, at: int, event: Event) -> None:
        heappush(self._heap, (at, next(self._numbers), event))

    def _happens(self, event: Event, now: int) -> None:
        """One thing that was due; a computed prompt is stored in its node's cache, from which others go."""
        self._hear(event, now)
        if type(event) is FirstToken:
            node, conversation, names = self._storing.pop(event.request)
            cache = self._caches[node]
            self._hear(BlocksStored(node, cache.store(conversation, names)), now)
            gone = cache.evict()
            if gone:
                self._hear(BlocksEvicted(node, gone), now)

    def _hear(self, event: Event, now: int) -> None:
        begin = time.thread_time_ns()
        self.conductor.on(event, now)
        self._follow_ns += time.thread_time_ns() - begin
        self._num_events += 1


def _fresh(rng: random.Random, num_names: int) -> bytes:
    return rng.randbytes(num_names * NAME_BYTES)


def _split(names: bytes) -> tuple[bytes, ...]:
    """New objects each time, whose hashes nobody has computed yet."""
    return tuple([names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)])


def table(found: Sequence[Timing]) -> Table:
    shown = Table(
        title=f"python -m benchmarks conductor: {found[0].policy}, {found[0].decisions:,} decisions each"
    )
    heads = ("cluster", "indexed blocks", "decisions/s", "mean µs", "P50", "P99", "max", "follow-up µs")
    for head in (*heads, "in prefill", "copying", "fetches", "matched"):
        shown.add_column(head)
    for each in found:
        shown.add_row(
            each.layout,
            f"{each.indexed_blocks:,}",
            f"{each.decisions_per_s:,.0f}",
            *(
                f"{value:,.0f}"
                for value in (each.mean_us, each.p50_us, each.p99_us, each.max_us, each.follow_up_us)
            ),
            f"{each.queued:.1f}",
            f"{each.copying:.1f}",
            f"{each.fetches:,}",
            f"{100 * each.matched_share:.0f} %",
        )
    return shown
