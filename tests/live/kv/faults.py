"""One fault on the wire at a time, and what becomes of the KV that is on it.

    python -m tests.live.kv.faults --flips 10000 --seed 2

Two nodes without engines move blocks as nodes do: a prefix is fetched, or the KV of a prompt is handed over, as it is
and encoded. Each round one bit of one byte of all that goes over the session, both ways, frame headers included, is
flipped; or a connection is lost there; or the move is ended there. Every byte that counts as arrived is what it must
be, memory that was given back is written by nothing, and no slot or pin is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from isthmus.core.node import events
from isthmus.core.node.letters import HandoverGranted
from isthmus.core.types import Span
from isthmus.live.engine import codecs
from isthmus.live.engine.codecs import CODECS
from tests.live.kv.world import (
    BLOCKS,
    KEY,
    LAYOUT,
    NAMES,
    Fault,
    HarmfulNetwork,
    World,
    chunks,
    layer_of,
    plain,
    played,
    ready,
    until,
)

COUNT, NUM_TOKENS, SIZE = 6, 22, LAYOUT.block_size
"""What is moved; the last block of a hand-over is not full."""
THERE, HERE = (5, 3, 1, 0, 2, 4), (9, 4, 0, 5, 1, 3)
"""The blocks of a hand-over in the KV memory of both nodes."""
CANARY = b"\xa5" * LAYOUT.block_bytes
BLANK = bytes(LAYOUT.slice_bytes)


class Case(NamedTuple):
    move: str
    codec: str
    fault: Fault
    connections: int


FLIPS = [Case(move, codec, Fault.FLIP, 1) for move, codec in product(("fetch", "hand-over"), CODECS)]
OTHERS = [
    Case(move, codec, fault, connections)
    for move, codec in product(("fetch", "hand-over"), (codecs.NONE, codecs.ZSTD))
    for fault, connections in ((Fault.LOST, 1), (Fault.LOST, 3), (Fault.CANCEL, 1))
]


def received(codec: str, data: bytes, num_tokens: int) -> bytes:
    """What the codec makes of a layer of KV."""
    if codec in codecs.EXACT:
        return data
    decoded = memoryview(bytearray(len(data)))
    encoded = codecs.encode(codec, LAYOUT, [memoryview(data)], num_tokens)
    codecs.decode(codec, LAYOUT, encoded, [decoded], num_tokens)
    return bytes(decoded)


async def fetch(world: World, codec: str) -> None:
    here = world.here
    world.there.put(0, COUNT)
    world.network.then = lambda: here.do(events.EndFetch(KEY))
    here.fetch(COUNT, codec=codec)
    await here.fetch_ended()
    for sent, got in zip(BLOCKS, here.chain(COUNT), strict=False):
        parts = [received(codec, layer_of(sent, layer), SIZE) for layer in range(LAYOUT.num_layers)]
        assert got in (None, b"".join(parts)), "a wrong block"
    here.store.drop(NAMES[:COUNT])
    slots = here.store.reserve(here.arena.num_slots)
    assert len(slots) == here.arena.num_slots, "a slot is missing"
    for slot in slots:
        here.arena.slot(slot)[:] = CANARY
    await world.quiet()
    assert all(here.arena.slot(slot) == CANARY for slot in slots), "a late byte was written"
    here.store.give_back(slots)


async def hand_over(world: World, codec: str) -> None:
    here, there, extent = world.here, world.there, plain(NUM_TOKENS, codec=codec)
    for number, data in zip(THERE, BLOCKS, strict=False):
        there.write(number, data)
    world.network.then = lambda: here.give_up(KEY, "cancelled")
    here.expect(extent, HERE)
    there.send(extent)
    await until(lambda: there.letters(HandoverGranted) or there.of(events.Gone) or here.failed)
    for tokens in chunks(NUM_TOKENS, [8]):
        ready(there, Span(tokens.start, tokens.stop), THERE)
        await asyncio.sleep(0)
    there.mover.first_token(KEY, 1)
    there.do(events.FinishHandover(KEY))
    await until(lambda: here.landed or here.failed)
    if here.landed:
        for block in range(12):
            at = HERE.index(block) if block in HERE else COUNT
            count = min(SIZE, max(0, NUM_TOKENS - at * SIZE))
            for layer in range(LAYOUT.num_layers):
                data = received(codec, layer_of(BLOCKS[at], layer)[: count * LAYOUT.token_bytes], count)
                assert layer_of(here.block(block), layer) == data + BLANK[len(data) :], "a wrong block"
        return
    for block in HERE:
        here.write(block, CANARY)
    await world.quiet()
    assert all(here.block(block) == CANARY for block in HERE), "a late byte was written"


def judged(world: World) -> str:
    """What found the fault: nothing where no harm was done, as in bytes that mean nothing."""
    reasons = {*world.here.reasons, *world.there.reasons}
    if world.here.mismatches:
        return "a seal"
    if any("came damaged" in reason for reason in reasons):
        return "a checksum"
    if any(reason.endswith("lost") for reason in reasons):
        return "the session"
    return "the protocol" if reasons else "nothing"


def one(case: Case, at: int | None, seed: object) -> tuple[str, HarmfulNetwork]:
    """One round. Raises AssertionError for what must not be."""
    network, found = HarmfulNetwork(case.connections, case.fault, at, seed), list[str]()

    @played(network=lambda: network, slots=COUNT + 4, blocks=12)
    async def play(world: World) -> None:
        await (fetch if case.move == "fetch" else hand_over)(world, case.codec)
        found.append(judged(world))
        world.leaves = True

    play()
    return found[0], network


def rounds(num_flips: int, seed: int) -> Iterator[tuple[Case, Counter[str]]]:
    """So many flips, and a tenth of that in lost connections and ended moves: what found them, by case."""
    for cases, total in ((FLIPS, num_flips), (OTHERS, max(len(OTHERS), num_flips // 10))):
        for number, case in enumerate(cases):
            random, found = Random(f"{seed} {case}"), Counter[str]()
            num_bytes = one(case, None, seed)[1].num_bytes
            while found.total() < total // len(cases) + (number < total % len(cases)):
                by, network = one(case, random.randrange(num_bytes), random.random())
                found[by] += network.is_done
            yield case, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000, help="faults on the wire, one to a move of blocks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("isthmus").setLevel(
        logging.CRITICAL
    )  # nodes log what they find damaged: here it is everything
    for case, found in rounds(given.flips, given.seed):
        print(*case, dict(found), "found it; no wrong block, late byte or leak", flush=True)


if __name__ == "__main__":
    main()
