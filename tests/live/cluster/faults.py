"""One fault on the wire at a time, and what becomes of the KV that is on it.

    python -m tests.live.cluster.faults --flips 10000 --seed 2

Two nodes without engines move blocks as nodes do: a prefix is fetched, or the KV of a prompt is handed over, as it is
and encoded. Each round one bit of one byte of all that goes over the session, both ways, frame headers included, is
flipped; or a connection is lost there; or the move is cancelled there. Afterwards every byte that counts as arrived
is compared with what it must be, memory that was given back is watched for late bytes, and slots and pins are
counted. Deterministic but for the order in which threads get to run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from random import Random

from rich.console import Console
from rich.table import Table

from isthmus.core.errors import ConfigError
from isthmus.core.node import events
from isthmus.core.node.extent import Extent
from isthmus.core.types import RequestId, Span
from isthmus.live.engine import codecs
from isthmus.live.store import Store
from tests.live.cluster.fault_peers import (
    LAYOUT,
    OTHER,
    Fault,
    Harm,
    HarmfulNetwork,
    Side,
    join,
    kv_block,
    put_chain,
    store_of,
)

NUM_BLOCKS, NUM_TOKENS = 6, 22
"""Of what is moved; the last block of a hand-over is not full."""
THERE, HERE = (5, 3, 1, 0, 2, 4), (9, 4, 0, 5, 1, 3)
"""The blocks of a hand-over in the KV memory of both nodes."""
MEMORY_BLOCKS = 12
KEY = RequestId("request#1")
BLANK, CANARY = 0x5A, 0xA5
"""What KV memory holds before a move, and memory that was given back after it."""
TOO_LONG = "it takes too long to close"
PEACEFUL = {"closed here", "closed by the peer", TOO_LONG}
"""How a session ends that nothing happened to."""
LIMIT_S = 60.0
WIDTH = 200
QUIET_TURNS = 300
"""Turns of the event loop after which everything under way has arrived, or never will."""


@dataclass
class Row:
    """`rounds` moves with one fault each. `by_…`: what found it; `unharmed`: nothing did, and no harm was done, as in
    bytes that mean nothing. `blocks`: that counted as arrived; of those `wrong_blocks` were not what they must be.

    `late_bytes`: moves after which memory that had been given back was written. `leaks`: moves after which a slot or
    a pin was missing. `unexpected`: exceptions that nobody handled, and moves that did not end.
    """

    move: str
    codec: str
    fault: str
    rounds: int = 0
    by_seal: int = 0
    by_checksum: int = 0
    by_protocol: int = 0
    by_session_end: int = 0
    unharmed: int = 0
    blocks: int = 0
    wrong_blocks: int = 0
    late_bytes: int = 0
    leaks: int = 0
    unexpected: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.wrong_blocks or self.late_bytes or self.leaks or self.unexpected)


@dataclass
class Found:
    """All rows; `reasons` of the first few things that must not be."""

    seed: int
    rows: list[Row]
    reasons: list[str]


@dataclass(frozen=True)
class Case:
    move: str
    codec: str
    fault: Fault
    connections: int

    @property
    def label(self) -> str:
        return f"{self.fault} of {self.connections}" if self.fault is Fault.LOST else str(self.fault)


CODECS = codecs.CODECS
FLIPS = [Case(move, codec, Fault.FLIP, 1) for move in ("fetch", "hand-over") for codec in CODECS]
OTHERS = [
    Case(move, codec, fault, connections)
    for move in ("fetch", "hand-over")
    for codec in (codecs.NONE, codecs.ZSTD)
    for fault, connections in ((Fault.LOST, 1), (Fault.LOST, 3), (Fault.CANCEL, 1))
]


def run(num_flips: int = 10_000, seed: int = 0, report: Callable[[str], None] = lambda line: None) -> Found:
    """So many flips, and a tenth of that in lost connections and cancelled moves. Raises ConfigError for fewer than
    one flip a case."""
    if num_flips < len(FLIPS):
        raise ConfigError(f"{num_flips} flips are too few: there are {len(FLIPS)} cases")
    with _quiet():
        return asyncio.run(_run(num_flips, seed, report))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nodes log what they find damaged, which here is everything."""
    logger = logging.getLogger("isthmus")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _run(num_flips: int, seed: int, report: Callable[[str], None]) -> Found:
    found = Found(seed, [], [])
    with contextlib.closing(Rig(found.reasons)) as rig:
        for cases, total in ((FLIPS, num_flips), (OTHERS, max(len(OTHERS), num_flips // 10))):
            for number, case in enumerate(cases):
                share = total // len(cases) + (number < total % len(cases))
                row = await rig.row(case, share, Random(f"{seed} {case}"))
                found.rows.append(row)
                report(
                    f"{row.move}, {row.codec}, {row.fault}: {row.rounds} rounds, {row.wrong_blocks} wrong blocks"
                )
    return found


class Rig:
    """Both nodes, for all rounds; each round has a session of its own."""

    def __init__(self, reasons: list[str]) -> None:
        self._reasons = reasons
        self.source = Side(store_of(LAYOUT, NUM_BLOCKS + 4), LAYOUT, MEMORY_BLOCKS)
        self.target = Side(store_of(LAYOUT, NUM_BLOCKS + 4), LAYOUT, MEMORY_BLOCKS)
        self._names = [bytes([number]) * 16 for number in range(NUM_BLOCKS)]
        self._blocks = [kv_block(LAYOUT, number) for number in range(NUM_BLOCKS)]
        put_chain(self.source.store, self._names, self._blocks)
        for number, data in zip(THERE, self._blocks, strict=True):
            for layer in range(LAYOUT.num_layers):
                size = LAYOUT.slice_bytes
                self.source.memory.layers[layer][number * size : (number + 1) * size] = data[
                    layer * size : (layer + 1) * size
                ]
        self._state = state(self.source.store), state(self.target.store)
        self._exceptions: list[str] = []

    def close(self) -> None:
        self.source.close()
        self.target.close()

    async def row(self, case: Case, rounds: int, random: Random) -> Row:
        """So many rounds in which the fault happened."""
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self._exceptions.append(str(context.get("exception") or context["message"]))
        )
        row = Row(case.move, case.codec, case.label)
        clean = Harm(case.fault, None, random)
        await self._round(case, clean, Row("", "", ""))
        while row.rounds < rounds:
            harm = Harm(case.fault, random.randrange(clean.num_bytes), random)
            await self._round(case, harm, row)
            row.rounds += harm.is_done
        return row

    async def _round(self, case: Case, harm: Harm, row: Row) -> None:
        mismatches = self._num_mismatches()
        self.source.reasons, self.target.reasons = [], []
        for layer in self.target.memory.layers:
            layer[:] = bytes([BLANK]) * len(layer)
        try:
            async with asyncio.timeout(LIMIT_S):
                server = await join(HarmfulNetwork(harm, case.connections), self.target, self.source)
                move = self._fetch if case.move == "fetch" else self._hand_over
                await move(case, harm, row)
                server.close()
                for side in (self.source, self.target):  # a session that ends later would end the next round's
                    side.peers.left(OTHER)
        except Exception as error:
            self._exceptions.append(f"{case}: {type(error).__name__}: {error}")
        if harm.is_done:
            self._judge(row, self._num_mismatches() > mismatches)
        self._check_leaks(case, row)
        row.unexpected += len(self._exceptions)
        self._reasons.extend(self._exceptions[: 10 - len(self._reasons)])
        self._exceptions.clear()

    def _num_mismatches(self) -> float:
        return self.target.mover.gauges()["seal_mismatches_total"]

    def _judge(self, row: Row, by_seal: bool) -> None:
        """What found the fault."""
        reasons = self.source.reasons + self.target.reasons
        if by_seal:
            row.by_seal += 1
        elif any("came damaged" in reason for reason in reasons):
            row.by_checksum += 1
        elif any(reason.endswith("lost") for reason in reasons):
            row.by_session_end += 1
        elif set(reasons) - PEACEFUL:
            row.by_protocol += 1
        else:
            row.unharmed += 1

    def _check_leaks(self, case: Case, row: Row) -> None:
        self.target.store.drop(self._names)
        found = state(self.source.store), state(self.target.store)
        if found != self._state:
            row.leaks += 1
            self._state = found
            self._exceptions.append(f"{case}: slots in use, pins and reservations are {found} now")

    # The moves.

    async def _fetch(self, case: Case, harm: Harm, row: Row) -> None:
        target, store = self.target, self.target.store
        harm.then = lambda: target.mover.do(events.EndFetch(KEY))
        order = events.Fetch(KEY, OTHER, tuple(self._names), 0, codec=case.codec)
        await target.fetching(target.fetch(order))
        for name, block in zip(self._names, self._blocks, strict=True):
            into = memoryview(bytearray(LAYOUT.block_bytes))
            if store.get(name, into):
                row.blocks += 1
                row.wrong_blocks += into != received(case.codec, block, LAYOUT.block_size)
        slots = store.reserve(store.arena.num_slots)
        canaries = [store.arena.slot(slot) for slot in slots]
        await self._watch(canaries, row)
        store.give_back(slots)

    async def _hand_over(self, case: Case, harm: Harm, row: Row) -> None:
        source, target = self.source, self.target
        harm.then = lambda: target.give_up(KEY, "cancelled")
        assert target.session is not None
        size = LAYOUT.block_size
        stop = -(-NUM_TOKENS // size) * size
        extent = Extent(size, 0, NUM_TOKENS, stop, NUM_TOKENS, case.codec)
        target.expect(KEY, extent, HERE)
        if source.session is not None and not target.session.closed:
            source.send(KEY, extent)
            for span in (Span(0, 8), Span(8, NUM_TOKENS)):
                source.mover.kv_ready(KEY, Span(0, LAYOUT.num_layers), span, THERE)
                await asyncio.sleep(0)
            source.mover.first_token(KEY, 1)
            source.mover.do(events.Finish(KEY))
        while not target.landed and not target.failed and not target.session.ended:
            await asyncio.sleep(0)
        if not target.landed:
            target.give_up(KEY, "the session was over before it began")
        if not target.failed:
            self._check_memory(case.codec, row)
        blocks, width = HERE if target.failed else (), LAYOUT.slice_bytes
        await self._watch(
            [layer[at * width : (at + 1) * width] for layer in target.memory.layers for at in blocks], row
        )
        source.give_up(KEY, "over")

    def _check_memory(self, codec: str, row: Row) -> None:
        """Of the whole KV memory: what does not belong to the request is as it was."""
        size, width = LAYOUT.slice_bytes, LAYOUT.token_bytes
        for at in range(MEMORY_BLOCKS):
            number = HERE.index(at) if at in HERE else None
            count = 0 if number is None else min(LAYOUT.block_size, NUM_TOKENS - number * LAYOUT.block_size)
            expected = b""
            for layer in range(LAYOUT.num_layers if number is not None else 0):
                part = self._blocks[number or 0][layer * size : layer * size + count * width]
                blank = bytes([BLANK]) * (size - len(part))
                expected += received(codec, part, count, num_layers=1) + blank
            found = b"".join(bytes(layer[at * size : (at + 1) * size]) for layer in self.target.memory.layers)
            row.blocks += number is not None
            row.wrong_blocks += found != (expected or bytes([BLANK]) * len(found))

    async def _watch(self, memory: Sequence[memoryview], row: Row) -> None:
        """Ends the session; nothing that still arrives may touch memory that was given back."""
        for view in memory:
            view[:] = bytes([CANARY]) * len(view)
        sessions = [side.session for side in (self.target, self.source) if side.session is not None]
        await _turns(lambda: False, 10)
        for session in sessions:
            session.close()
        await _turns(lambda: all(session.ended for session in sessions), QUIET_TURNS)
        for session in sessions:
            session.abort(TOO_LONG)
        while not all(session.ended for session in sessions):
            await asyncio.sleep(0)
        while state(self.source.store) != self._state[0]:
            await asyncio.sleep(0.001)
        row.late_bytes += any(set(view) != {CANARY} for view in memory)


async def _turns(over: Callable[[], bool], limit: int) -> None:
    for _ in range(limit):
        if over():
            return
        await asyncio.sleep(0)


def state(store: Store) -> tuple[int, int, int]:
    """Bytes in use, pinned and reserved slots. Raises AssertionError when the store's books do not agree."""
    store.check()
    stat = store.stat()
    return stat.memory.used_bytes, stat.num_pinned, stat.num_reserved


def received(codec: str, data: bytes, num_tokens: int, num_layers: int = LAYOUT.num_layers) -> bytes:
    """What the codec makes of these layers of KV."""
    if codec in codecs.EXACT:
        return data
    size, found = len(data) // num_layers, []
    for at in range(0, len(data), size):
        encoded = codecs.encode(codec, LAYOUT, [memoryview(data)[at : at + size]], num_tokens)
        decoded = memoryview(bytearray(size))
        codecs.decode(codec, LAYOUT, encoded, [decoded], num_tokens)
        found.append(bytes(decoded))
    return b"".join(found)


def table(found: Found) -> Table:
    names = [field.name for field in fields(Row)]
    title = f"one fault a move, seed {found.seed}; the last four must be 0"
    shown = Table(*[name.replace("_", " ") for name in names], title=title)
    for row in found.rows:
        shown.add_row(*[str(getattr(row, name)) for name in names])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=10_000, help="faults on the wire, one to a move of blocks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = run(given.flips, given.seed, partial(print, flush=True))
    Console(width=WIDTH).print(table(found))
    print("\n".join(found.reasons))


if __name__ == "__main__":
    main()
