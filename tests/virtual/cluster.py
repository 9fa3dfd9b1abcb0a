"""A virtual cluster: requests in, what the conductor saw and what clients got out."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import msgspec

from isthmus.config import Config
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.conductor import Abort, LinkState, PromptContent, Route
from isthmus.core.cost import compile_cost
from isthmus.core.errors import IsthmusError
from isthmus.core.node.away import LEASE_NS
from isthmus.core.types import (
    NS_PER_S,
    BlockName,
    Generated,
    Job,
    ModelCard,
    RequestId,
    Reuse,
    Reused,
    Sampling,
    Tier,
    TokenLogprobs,
)
from isthmus.facts import NodeFacts, clusters_of
from isthmus.lab.sim.deployment import Deployment
from isthmus.live.cluster.donors import DonorTokens
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.links import AddressBook
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import NodeOptions, Runtime
from isthmus.live.engine.emulated import (
    LAYERS,
    EmulatedBatch,
    EmulatedEngine,
    Recipe,
    expected_tokens,
    layout_of,
)
from isthmus.live.engine.interface import SIGNATURE_BITS, Chunk, Row, Sampled, split_layers
from tests.tape import Entry, MemoryTape
from tests.virtual.carried import Transfer
from tests.virtual.links import VirtualLinks
from tests.virtual.loop import ARRIVAL, OTHERS, ManualLoop
from tests.virtual.mover import LazyMover, MemoryFiles, VirtualMover, pool_of, store_opener
from tests.virtual.stage import VirtualStage
from tests.virtual.worker import LoopWorker

VOCABULARY = 1 << 31
"""Far more than any workload draws, so that one token of an answer can be told from all others."""
MAX_LENGTH = 1 << 30
SKEW_NS = 1_234_567_891
"""By so much more each node's clock is ahead of the head's: nobody may compare two clocks."""


class VirtualRequest(msgspec.Struct, frozen=True):
    """One request of a workload. It asks for up to `max_tokens` (0: as many as it gets); its answer ends by
    itself after `output_tokens`."""

    arrival_ns: int
    tokens: tuple[int, ...]
    output_tokens: int
    max_tokens: int = 0
    salt: str = ""
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    sampling: Sampling = Sampling(temperature=0.0)
    tenant: str = ""
    reuse: Reuse = Reuse.EXACT


class Outcome(msgspec.Struct):
    """What a client saw: all of each token and when it came (ns), or the error instead of the rest."""

    generated: list[Generated]
    at_ns: list[int]
    error: IsthmusError | None = None

    @property
    def tokens(self) -> list[int]:
        return [generated.token for generated in self.generated]


class Flight(msgspec.Struct, frozen=True):
    """A whole run: what the conductor saw and answered, nodes joining included, what clients saw, and bytes of KV that
    came from node to node."""

    log: list[Entry]
    outcomes: list[Outcome]
    bytes_moved: dict[Transfer, int]


def _recipe(layout: KVLayout) -> Recipe:
    return Recipe("virtual", layout, VOCABULARY)


@lru_cache(1 << 12)
def _answer(layout: KVLayout, tokens: tuple[int, ...], count: int, salt: str) -> list[int]:
    """Each is asked for several times, by several clusters."""
    return expected_tokens(_recipe(layout), tokens, count, salt=salt)


class SamplingEngine(EmulatedEngine):
    """Where a request is sampled, each token depends on its seed and on all of its answer before, in order."""

    def build(self, chunks: Sequence[Chunk]) -> EmulatedBatch:
        """A prompt that is assembled is computed all the same, so its KV is exact."""
        batch = super().build(chunks)
        batch.reused = {
            at: Reused(0, 0, 0, len(chunk.tokens))
            for at, chunk in enumerate(chunks)
            if chunk.assembling is not None
        }
        return batch

    def step(self, batch: EmulatedBatch, rows: Sequence[Row], *hooks: Any) -> Sampled:
        certain, logprobs = super().step(batch, rows, *hooks)
        drawn = [_drawn(token, row) for token, row in zip(certain, rows, strict=True)]
        known = zip(drawn, rows, logprobs, strict=True)
        return drawn, [
            each and TokenLogprobs(_chance(token, row), ((token, 0.0),)) for token, row, each in known
        ]


def _drawn(token: int, row: Row) -> int:
    """Of numbers alone: the hash of None is another in each process."""
    if not row.sampling.temperature:
        return token
    return hash((token, row.sampling.seed or 0, *row.outputs)) % VOCABULARY


def _chance(token: int, row: Row) -> float:
    return -1.0 - (token + len(row.outputs)) % 97


class TokenDonors(DonorTokens):
    """Signs tokens alone: the emulated engine has no embeddings."""

    ready = True

    def sign(self, tokens: Sequence[int]) -> bytes:
        rows = [random.Random(token).getrandbits(SIGNATURE_BITS) for token in set(tokens)]
        counts = [sum([row >> bit & 1 for row in rows]) for bit in range(SIGNATURE_BITS)]
        signature = sum([(2 * count > len(rows)) << bit for bit, count in enumerate(counts)])
        return signature.to_bytes(SIGNATURE_BITS // 8, "little")


CARD = ModelCard("virtual", MAX_LENGTH, VOCABULARY, created_s=0)


class VirtualHead(Head):
    """Tells the links what it decides, since the simulator keeps books of attempts."""

    links: VirtualLinks

    def _act(self, answer: Any, now: int) -> None:
        match answer:
            case Route():
                stream = self._streams[answer.request]
                self.links.route(answer, len(stream.job.tokens) + len(stream.generated))
            case Abort():
                self.links.withdraw(answer.request)
        super()._act(answer, now)


class VirtualLinkStats:
    """What crosses links between clusters, as the links themselves know it."""

    def __init__(self, links: VirtualLinks) -> None:
        self._links = links

    def take(self) -> tuple[LinkState, ...]:
        return self._links.moves.link_states(self._links.now)

    def heard(self, *_: Any) -> None:
        """Nodes know less."""

    left = heard


class VirtualCluster:
    """The nodes of a deployment, with emulated engines. Its `faults` come and go as in the simulator.

    `spare_slots`: of each arena, beside those that its facts say. Without, fetches come in rounds, and what finds no
    slot is lost; the simulator has neither. `disks_stay`: a node that comes back finds what its SSD had; in the
    simulator it finds nothing.
    """

    def __init__(
        self, config: Config, deployment: Deployment, spare_slots: int = 1 << 14, *, disks_stay: bool = False
    ) -> None:
        self._spare_slots, self._disks_stay = spare_slots, disks_stay
        self._files: dict[int, MemoryFiles] = {}
        size = deployment.block_size
        self._config, self.deployment = config, deployment
        states = deployment.nodes[0].state_blocks * size
        layers = max([LAYERS, *(facts.pipeline for facts in deployment.nodes)])
        self.recipe = _recipe(layout_of(size, layers=layers, state_tokens=states))

    def names(self, tokens: Sequence[int], salt: str = "") -> tuple[BlockName, ...]:
        """Names of the full blocks of a prompt, as the conductor sees them."""
        recipe = self.recipe
        return tuple(BlockNamer(revision=recipe.revision, layout=recipe.layout, salt=salt).names(tokens))

    def answer(self, request: VirtualRequest) -> list[int]:
        """The tokens it must get."""
        return list(_answer(self.recipe.layout, request.tokens, request.output_tokens, request.salt))

    def content(self, request: VirtualRequest) -> PromptContent | None:
        """What the conductor is told of a prompt."""
        return TokenDonors(CARD).content_of(self._job(RequestId(""), request))

    def run(self, requests: Sequence[VirtualRequest]) -> Flight:
        """All requests to their ends. Request number i, in the order given, is called `i`."""
        with asyncio.Runner(loop_factory=ManualLoop) as runner:
            return runner.run(self._run(requests))

    async def _run(self, requests: Sequence[VirtualRequest]) -> Flight:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ManualLoop)
        links = VirtualLinks(self.deployment, loop, self.recipe.layout)
        tape, limits, rules = MemoryTape(), self._config.limits, self.deployment.rules
        head = VirtualHead(
            rules,
            CARD,
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=tape,
            addresses=AddressBook([cluster.name for cluster in clusters_of(self._config)], rules.links),
            network=links.ether.network,
            clock_ns=loop.clock_ns,
        )
        head.links = links
        head._donors = TokenDonors(CARD)
        head._link_stats = VirtualLinkStats(head.links)  # type: ignore[assignment]
        join = await head.open("head", 0)
        async with asyncio.TaskGroup() as group:
            running: dict[int, tuple[NodeProcess, asyncio.Task[str]]] = {}

            def start(slot: int) -> None:
                head.links.entering = slot
                facts = self.deployment.nodes[slot]
                if slot not in self._files or not self._disks_stay:
                    self._files[slot] = MemoryFiles(loop.time)
                files = self._files[slot]
                options = NodeOptions(facts, join, limits.transfer_s, host=facts.node, shares_memory=False)
                skew_ns = (slot + 1) * SKEW_NS

                def clock_ns(skew_ns: int = skew_ns) -> int:
                    return loop.clock_ns() + skew_ns

                runtime = Runtime(
                    links.ether.view(slot),
                    clock_ns,
                    partial(VirtualMover, links),
                    pool_of,
                    lambda process: LoopWorker(process, loop, lambda: process.mover),
                )
                engine = self._engine(facts, 0)
                opener = store_opener(facts, engine, files, self._spare_slots)
                process = NodeProcess(engine, options, runtime, opener)
                links.nodes[slot].begin_anew(process.node)
                running[slot] = process, group.create_task(process.run())
                for stage in range(1, facts.pipeline):
                    engine, files = self._engine(facts, stage), MemoryFiles(loop.time)
                    opener = store_opener(facts, engine, files, self._spare_slots)
                    later = VirtualStage(
                        engine, replace(options, stage=stage), replace(runtime, mover_of=LazyMover), opener
                    )
                    group.create_task(later.run())

            for slot in range(len(self.deployment.nodes)):
                start(slot)
                await loop.settle()  # a group takes longer to form, and the conductor counts nodes as they join
            await head.wait_for([facts.node for facts in self.deployment.nodes])
            assert not loop.now_ns
            for time in self.deployment.faults.times():
                loop.set(time, OTHERS, self._change, head, running, start)
            clients = [
                group.create_task(self._ask(loop, head, RequestId(str(index)), request))
                for index, request in enumerate(requests)
            ]
            outcomes = [await client for client in clients]
            await loop.settle()
            for fault in self.deployment.faults.sessions:  # what nodes still say to each other is heard
                if math.isfinite(fault.delay_s):
                    await loop.sleep_until(loop.now_ns + int(fault.delay_s * NS_PER_S) + 1)
            if any(process.node.num_hosted for process, _ in running.values()):
                await loop.sleep_until(loop.now_ns + LEASE_NS + 1)
            log = list(tape.entries)
            for slot, (process, _) in running.items():
                if head.links.nodes[slot].alive:
                    process.node.check_idle()
                    _check_picture(head, process)
            await head.close()
        return Flight(log, outcomes, links.ether.gate.carried.bytes_moved())

    def _change(
        self,
        head: VirtualHead,
        running: Mapping[int, tuple[NodeProcess, asyncio.Task[str]]],
        start: Callable[[int], None],
    ) -> None:
        """One of the faults begins or ends."""
        links, faults = head.links, self.deployment.faults
        now = links.now
        links.moves.change_links(partial(faults.factor, now=now), now)
        for node in links.nodes:
            dead = faults.is_dead((node.facts.node, node.facts.cluster), now)
            if node.alive and dead:
                node.die(now)
                process, task = running[node.slot]
                task.cancel()
                process.worker.stop()
                head.leave(node.facts.node, "killed")
                links.lose(node)
            elif not node.alive and not dead:
                start(node.slot)
        links.moves.sessions.change(links.nodes)
        links.moves.disks.change(links.nodes, now)
        for node in links.nodes:
            self._files[node.slot].fails = links.moves.disks.fails(node)
        links.settle()

    def _engine(self, facts: NodeFacts, stage: int) -> EmulatedEngine:
        layers = split_layers(self.recipe.layout.num_layers, facts.pipeline)[stage]
        return SamplingEngine(
            self.recipe,
            compile_cost(facts.cost),
            facts.kv_blocks,
            max_length=MAX_LENGTH,
            max_sequences=facts.live_states,
            layers=layers,
        )

    async def _ask(self, loop: ManualLoop, head: Head, name: RequestId, request: VirtualRequest) -> Outcome:
        await loop.sleep_until(request.arrival_ns, ARRIVAL)
        outcome = Outcome([], [])
        try:
            async for batch in head.submit(self._job(name, request)):
                outcome.generated += batch
                outcome.at_ns += [loop.now_ns] * len(batch)
        except IsthmusError as error:
            outcome.error = error
        return outcome

    def _job(self, name: RequestId, request: VirtualRequest) -> Job:
        max_tokens = request.max_tokens or request.output_tokens
        stops = self._last_token(request) if request.output_tokens < max_tokens else ()
        return Job(
            request=name,
            tokens=request.tokens,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(request.sampling, stop_tokens=stops),
            tenant=request.tenant,
            salt=request.salt,
            priority=request.priority,
            reuse=request.reuse,
            ttft_ms=request.ttft_ms,
            tbt_ms=request.tbt_ms,
            weight=self.deployment.shares.weight_of(request.tenant),
        )

    def _last_token(self, request: VirtualRequest) -> tuple[int, ...]:
        """The token at which the answer is to end. It must not come earlier."""
        answer = self.answer(request)
        assert answer[-1] not in answer[:-1], "another vocabulary is needed"
        return (answer[-1],)


def _check_picture(head: Head, process: NodeProcess) -> None:
    """What the conductor believes of a node's cache is what the node keeps, tier by tier, and its store has all of it
    and nothing else."""
    node, view = process.node, head._desk.conductor.view
    index, bit = view.index, view.nodes[node.node].bit
    believed = {name for name, mask in index._held.items() if mask & bit}
    on_disk = {name for name, mask in index._disk.items() if mask & bit}
    tiers = node.tiers
    if tiers is None:
        assert (believed, on_disk) == (set(node.scheduler.pool._block_of), set())
        return
    assert on_disk == set(tiers.ssd.held), "the conductor is wrong about an SSD"
    assert believed - on_disk == set(tiers.dram.held), "the conductor is wrong about a DRAM"
    assert process._cache is not None
    store = process._cache.store
    kept = {name: block.tier for name, block in store._directory.blocks.items()}
    # A block is promoted as far as there is room: by decision in DRAM, it may still be on disk, and is found there.
    kept |= {name: Tier.MEMORY for name in tiers.dram.held if kept.get(name) is Tier.DISK}
    assert kept == dict.fromkeys(tiers.dram.held, Tier.MEMORY) | dict.fromkeys(tiers.ssd.held, Tier.DISK)
    stat = store.stat()
    assert (stat.num_pinned, stat.num_reserved) == (0, 0), "a slot was not given back"
    store.check()
