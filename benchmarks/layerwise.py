"""`python -m benchmarks layerwise`: a prefill whose prefix is loaded, and whose new KV is stored, layer by layer.

The parts are measured alone and then together, by the loader that a node uses: from the DRAM arena, from the SSD, and
from a source held to so many bytes per second that loading takes a given share of the time of computing. Every round
runs all rows in turns, and the medians count; what a round overlaps is compared with its own parts, measured just
before and after. Whatever is loaded, the logits must come out the same to the bit.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from isthmus.core.blocks import BlockNamer, seal
from isthmus.core.errors import ConfigError
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.interface import Chunk
from isthmus.live.kv.cache import EngineCache, Loading
from isthmus.live.store import Arena, Log, Shape, Store

PREFIX_TOKENS = 4000
SUFFIX_TOKENS = 512
LOAD_SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)
_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Round:
    """Seconds of one source: each part alone, and all together."""

    load_s: float
    compute_s: float
    store_s: float
    overlapped_s: float

    @property
    def serial_s(self) -> float:
        return self.load_s + self.compute_s + self.store_s

    @property
    def ratio(self) -> float:
        return self.overlapped_s / max(self.load_s, self.compute_s)


@dataclass(frozen=True)
class Result:
    """All rounds of one source."""

    source: str
    load_bytes: int
    num_layers: int
    rounds: tuple[Round, ...]

    def median(self, part: Callable[[Round], float]) -> float:
        return statistics.median(map(part, self.rounds))

    @property
    def bound(self) -> float:
        """The least ratio that whole layers allow: the first is loaded before, or the last computed after all else
        (a flow shop of two machines and equal layers)."""
        load_s, compute_s = self.median(lambda each: each.load_s), self.median(lambda each: each.compute_s)
        return 1 + min(load_s, compute_s) / max(load_s, compute_s) / self.num_layers


Source = Callable[[float], Loading]
"""Begins to load the prefix; is told how many seconds computing takes."""


class _PacedSource:
    """A prefix that arrives layer by layer at a fixed rate: to an `EngineCache`, another node's blocks."""

    start = 0

    def __init__(self, memory: memoryview, offsets: Callable[[int], list[int]], layer_s: float) -> None:
        self.condition = threading.Condition()
        self._memory, self._offsets, self._layer_s = memory, offsets, layer_s
        self._started_s = time.perf_counter()

    def release(self) -> None:
        """Nothing is held."""

    def await_layer(self, layer: int, stop: int, given_up: Callable[[], bool]) -> tuple[memoryview, list[int]]:
        left_s = self._started_s + (layer + 1) * self._layer_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return self._memory, self._offsets(layer)[:stop]


class _Bench:
    """One engine that has computed the prefix, whose KV is in `ram`, and in `ssd` when there is one.

    Engine blocks and tokens of the prefix come first, those of the suffix follow.
    """

    def __init__(self, engine: Engine, prefix: int, suffix: int) -> None:
        size = engine.layout.block_size
        self.engine, self._prefix = engine, prefix
        self._num_cached, self._num_new = prefix // size, suffix // size
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(0, engine.vocab_size, (prefix + suffix,), generator=generator).tolist()
        self._blocks = range(engine.layout.blocks_for(prefix + suffix))
        self.names = BlockNamer(revision=engine.revision, layout=engine.layout).names(self._tokens)
        for at in range(0, prefix, _CHUNK_TOKENS):
            chunk = Chunk(self._tokens[at : min(at + _CHUNK_TOKENS, prefix)], at, self._blocks, False)
            engine.step(engine.build([chunk]), [])
        self._expected = self._computed()
        self._nothing = memoryview(bytes(engine.layout.slice_bytes))
        self._saver = ThreadPoolExecutor(1, "save")

    def close(self) -> None:
        self._saver.shutdown()

    def put(self, store: Store) -> list[int]:
        """The prefix, into a store's arena; returns its slots."""
        arena, layout = store.arena, self.engine.layout
        slots = store.reserve(self._num_cached)
        assert len(slots) == self._num_cached
        for layer in range(layout.num_layers):
            self.engine.memory.save(layer, self._cached, arena.memory, self._offsets(slots, layer))
        parents = [None, *self.names]
        for name, parent, slot in zip(self.names, parents, slots, strict=False):
            seals = [seal(arena.slice(slot, layer)) for layer in range(layout.num_layers)]
            store.commit(name, parent, slot, seals)
        return slots

    @property
    def _cached(self) -> range:
        return self._blocks[: self._num_cached]

    def _offsets(self, slots: Sequence[int], layer: int) -> list[int]:
        layout = self.engine.layout
        return [slot * layout.block_bytes + layer * layout.slice_bytes for slot in slots]

    def from_store(self, cache: EngineCache) -> Source:
        return lambda compute_s: cache.load(self.names[: self._num_cached], self._cached)

    def paced(self, cache: EngineCache, slots: Sequence[int], share: float) -> Source:
        """The same bytes from the arena's slots, so late as if they came from afar."""
        memory = cache.store.arena.memory

        def start(compute_s: float) -> Loading:
            layer_s = share * compute_s / self.engine.layout.num_layers
            link = _PacedSource(memory, lambda layer: self._offsets(slots, layer), layer_s)
            return cache.load(self.names[: self._num_cached], self._cached, link)

        return start

    def measure(self, source: Source, into: Arena) -> Round:
        """One round of one source. New KV is stored in the first slots of `into`."""
        before_s = _seconds(self._computed)
        store_s = _seconds(lambda: self._store_all(into))
        self._wipe()
        load_s = _seconds(lambda: source(before_s).wait(self._layers[-1], self._num_cached))
        self._wipe()
        overlapped_s = _seconds(lambda: self._check(self._overlapped(source(before_s), into)))
        compute_s = (before_s + _seconds(self._computed)) / 2
        return Round(load_s, compute_s, store_s, overlapped_s)

    @property
    def _layers(self) -> range:
        return range(self.engine.layout.num_layers)

    def _suffix(self) -> Chunk:
        return Chunk(self._tokens[self._prefix :], self._prefix, self._blocks, True)

    def _computed(self) -> torch.Tensor:
        return self.engine.forward(self.engine.build([self._suffix()]))

    def _overlapped(self, load: Loading, into: Arena) -> torch.Tensor:
        saves: list[Future[None]] = []
        logits = self.engine.forward(
            self.engine.build([self._suffix()]),
            on_layer=lambda layer: saves.append(self._saver.submit(self._store, layer, into)),
            before_layer=lambda layer: load.wait(layer, self._num_cached),
        )
        for save in saves:
            save.result()
        return logits

    def _store_all(self, into: Arena) -> None:
        for layer in self._layers:
            self._store(layer, into)

    def _store(self, layer: int, into: Arena) -> None:
        """One layer of the suffix's full blocks, sealed."""
        new = self._blocks[self._num_cached : self._num_cached + self._num_new]
        self.engine.memory.save(layer, new, into.memory, self._offsets(range(len(new)), layer))
        for slot in range(len(new)):
            seal(into.slice(slot, layer))

    def _wipe(self) -> None:
        """A prefix that was not loaded would show."""
        for layer in self._layers:
            self.engine.memory.fill(layer, self._cached, self._nothing, [0] * self._num_cached)

    def _check(self, logits: torch.Tensor) -> None:
        assert torch.equal(logits, self._expected), "a loaded prefix gave other logits than the computed one"


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def run(
    folder: Path,
    *,
    prefix: int = PREFIX_TOKENS,
    suffix: int = SUFFIX_TOKENS,
    shares: Sequence[float] = LOAD_SHARES,
    disk: Path | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    rounds: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """A row for DRAM, one for the SSD when `disk` names a folder for its log, and one for each of `shares`: a source
    paced so that loading takes that share of the time of computing. Raises ConfigError for lengths that do not fit.
    """
    with ExitStack() as stack:
        bench = stack.enter_context(
            closing(_Bench(_engine(folder, prefix, suffix, dtype, threads), prefix, suffix))
        )
        report(f"{bench.engine.kernels.name} kernels, {torch.get_num_threads()} threads")
        engine, num_blocks = bench.engine, len(bench.names)
        shape = Shape(engine.layout.num_layers, engine.layout.slice_bytes)
        into = stack.enter_context(closing(Arena(shape, num_blocks)))
        ram = stack.enter_context(_cache(engine, Store(Arena(shape, num_blocks))))
        slots = bench.put(ram.store)
        sources = {"DRAM": bench.from_store(ram)}
        if disk is not None:
            log = Log(disk, shape, 2 * num_blocks * shape.block_bytes + (1 << 20), engine.revision.encode())
            ssd = stack.enter_context(_cache(engine, Store(Arena(shape, num_blocks), log)))
            bench.put(ssd.store)
            ssd.store.flush()
            ssd.store.demote(bench.names)
            sources["SSD"] = bench.from_store(ssd)
        for share in shares:
            sources[f"paced, load {share:g} of compute"] = bench.paced(ram, slots, share)
        found: dict[str, list[Round]] = {name: [] for name in sources}
        for turn in range(rounds):
            for name, source in sources.items():
                found[name].append(bench.measure(source, into))
            report(f"round {turn + 1} of {rounds}")
    load_bytes = len(slots) * shape.block_bytes
    return [Result(name, load_bytes, shape.num_layers, tuple(each)) for name, each in found.items()]


def _engine(folder: Path, prefix: int, suffix: int, dtype: str | None, threads: int | None) -> Engine:
    probe = EngineOptions(dtype=dtype, threads=threads)
    size = probe.block_size
    if prefix < size or prefix % size or suffix < size:
        raise ConfigError(
            f"prefix {prefix} must be whole blocks of {size} tokens, and suffix {suffix} at least one"
        )
    engine = Engine(folder, probe)
    if prefix + suffix > min(engine.max_length, engine.num_blocks * size):
        raise ConfigError(
            f"prefix and suffix are {prefix + suffix} tokens, the model takes {engine.max_length} and the benchmark's "
            f"KV memory {engine.num_blocks * size}"
        )
    return engine


@contextmanager
def _cache(engine: Engine, store: Store) -> Iterator[EngineCache]:
    """Closes the store too."""
    with closing(store), closing(EngineCache(engine.memory, store)) as cache:
        yield cache


_PARTS: dict[str, Callable[[Round], float]] = {
    "load": lambda each: each.load_s,
    "compute": lambda each: each.compute_s,
    "store": lambda each: each.store_s,
    "serial": lambda each: each.serial_s,
    "overlapped": lambda each: each.overlapped_s,
}


def table(results: list[Result]) -> Table:
    """`ratio`: overlapped over the longer of load and compute; `bound`: the least that whole layers allow."""
    found = Table("source", *(f"{name} ms" for name in _PARTS), "ratio", "bound")
    for result in results:
        times = [f"{result.median(part) * 1e3:,.1f}" for part in _PARTS.values()]
        ratio = result.median(lambda each: each.ratio)
        found.add_row(result.source, *times, f"{ratio:.2f}", f"{result.bound:.2f}")
    return found


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {
            "source": result.source,
            "load_bytes": result.load_bytes,
            **{f"{name}_s": result.median(part) for name, part in _PARTS.items()},
            "ratio": result.median(lambda each: each.ratio),
            "bound": result.bound,
            "rounds": [asdict(each) for each in result.rounds],
        }
        for result in results
    ]
