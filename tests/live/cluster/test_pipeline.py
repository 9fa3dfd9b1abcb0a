"""Pipeline groups: in one event loop on a network of memory, and inside a whole cluster."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from isthmus.core.conductor import Rules
from isthmus.core.cost import Curve, compile_cost
from isthmus.core.errors import StartError
from isthmus.core.node.events import BlocksLost, Broken, DropBlocks, Gone, Woken
from isthmus.core.scheduler import Saved
from isthmus.core.types import Job, ModelCard, NodeId, RequestId, Role, Sampling
from isthmus.facts import NodeFacts, Sequences
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.pipeline import Group
from isthmus.live.cluster.process import EngineProcess, NodeOptions, OnLost, Runtime
from isthmus.live.cluster.stage import StageNode
from isthmus.live.engine.emulated import EmulatedEngine, Recipe, expected_tokens, layout_of
from isthmus.live.engine.interface import Hidden, Sampled, split_layers
from isthmus.live.peers import messages
from isthmus.live.peers.messages import StageFound, StageSaved
from isthmus.live.store import Arena, Log, Shape, Store
from tests.inside import inside
from tests.live.cluster import kit
from tests.live.cluster.kit import STEADY, ask, emulated, flip_bits
from tests.memory_network import MemoryNetwork
from tests.served import Client

STAGES, DRAM, DISK = 3, 32, 64
CURVE = Curve(kv_token_bytes=16, num_layers=4, prefill_token_s=1e-6, decode_fixed_s=1e-6)
RECIPE = Recipe("model", layout_of(16, layers=STAGES), 1000)
P, D = NodeId("p"), NodeId("d")
A, B = RequestId("a"), RequestId("b")
NAMES = [bytes([number]) * 16 for number in range(5)]


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1000) for _ in range(length))


class Meeting:
    """Stage 0 computes its second chunk, and stage 1 its first, only once both have begun."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def attend(self) -> None:
        self._barrier.wait(timeout=60)


class Watched(EmulatedEngine):
    """`attends`: what it does in the iteration of this number."""

    iteration = -1
    attends: Callable[[], None]

    def relay(self, *arguments: Any, **named: Any) -> Hidden:
        self._attend()
        return super().relay(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Sampled:
        self._attend()
        return super().step(*arguments, **named)

    def _attend(self) -> None:
        if self.iteration == 0:
            self.attends()
        self.iteration -= 1


class Scene:
    """A head, a group of `STAGES` and a decode node. `processes`: the stages, then the decode node; `ends`: of them."""

    def __init__(self, folder: Path | None, network: MemoryNetwork) -> None:
        self._folder, self.network = folder, network
        card = ModelCard("model", 1000, 1000, created_s=0)
        self.head = Head(Rules(), card, silence_s=30, rejoin_s=30, network=network)
        self.engines = [self._engine(layers) for layers in split_layers(STAGES, STAGES)]
        self.engines.append(self._engine((0, STAGES)))
        self.processes: list[EngineProcess] = []
        self.ends: list[asyncio.Task[str]] = []

    def _engine(self, layers: tuple[int, int]) -> Watched:
        return Watched(RECIPE, compile_cost(CURVE), 64, max_length=1000, layers=layers)

    def _options(self, node: NodeId, stage: int, join: str) -> NodeOptions:
        role, stages = (Role.PREFILL, STAGES) if node == P else (Role.DECODE, 1)
        kept = {"dram_blocks": DRAM, "ssd_blocks": DISK, "transit_blocks": 8} if self._folder else {}
        facts = NodeFacts(
            node, role, CURVE, 64, 16, pipeline=stages, token_budget=64, sequences=Sequences(8, 8, 8), **kept
        )
        return NodeOptions(facts, join, transfer_s=30, stage=stage)

    def _opener(self, at: int) -> Callable[[OnLost], Store] | None:
        if self._folder is None:
            return None
        layout, folder = self.engines[at].memory.layout, self._folder / str(at)
        shape = Shape(layout.num_layers, layout.slice_bytes)

        def opened(on_lost: OnLost) -> Store:
            folder.mkdir(exist_ok=True)
            return Store(Arena(shape, DRAM + 8), Log(folder / "log", shape, 1 << 20, b"test"), on_lost=on_lost)

        return opened

    async def start(self) -> None:
        join, runtime = await self.head.open("head", 1), Runtime(self.network)
        for at, engine in enumerate(self.engines):
            node, stage = (P, at) if at < STAGES else (D, 0)
            kind = StageNode if stage else NodeProcess
            self.processes.append(kind(engine, self._options(node, stage, join), runtime, self._opener(at)))
            self.ends.append(asyncio.create_task(self.processes[-1].run()))
        await self.head.wait_for([P, D])

    async def answer(self, name: str, prompt: Sequence[int], count: int = 10) -> int | None:
        """Checks it; returns how many of its prompt's tokens were cached."""
        job = Job(RequestId(name), tuple(prompt), count, Sampling(temperature=0.0))
        found = [generated async for batch in self.head.submit(job) for generated in batch]
        assert [each.token for each in found] == expected_tokens(RECIPE, prompt, count)
        return found[0].cached_tokens

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def scene(folder: Path | None = None, prepare: Callable[[Scene], None] = bool) -> AsyncIterator[Scene]:
    made = Scene(folder, MemoryNetwork())
    prepare(made)
    async with asyncio.timeout(60):
        await made.start()
        try:
            yield made
        finally:
            await made.head.close()
            await asyncio.gather(*made.ends, return_exceptions=True)


def threads() -> set[threading.Thread]:
    """Those that compute."""
    return {each for each in threading.enumerate() if each.name in ("worker", "stage")}


@pytest.mark.parametrize("kept", [False, True])
async def test_every_answer_is_exact_and_every_stage_counts_what_it_computes(
    kept: bool, tmp_path: Path
) -> None:
    before = threads()
    async with scene(tmp_path if kept else None) as some:
        prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 16, 65, 200))]
        for name, prompt in enumerate(prompts):
            assert await some.answer(f"first {name}", prompt) == 0
        await some.until(lambda: some.processes[0].gauges()["kv_blocks_available"] == 64)
        stages = some.processes[:STAGES]  # an answer may be there before the last one counts what made it
        expected = {
            "iterations": [1 + 1 + 2 + 4] * STAGES,
            "tokens_computed": [sum(map(len, prompts))] * STAGES,
            "tokens_sampled": [0, 0, len(prompts)],
        }
        await some.until(
            lambda: expected == {name: [each.runs.counters[name] for each in stages] for name in expected}
        )
        assert await asyncio.gather(
            *[some.answer(f"again {name}", prompt) for name, prompt in enumerate(prompts)]
        ) == [0, 15 if kept else 0, 64, 192]
        assert len(threads() - before) == STAGES + 1
        for process in some.processes:
            await some.until(lambda mover=process.mover: not (mover._loads or mover._staged))
    assert [end.result() for end in some.ends] == ["stopped by the head"] * (STAGES + 1)
    assert not threads() - before


@pytest.mark.parametrize("count", range(6))
async def test_what_a_stage_found_comes_in_as_many_messages_as_it_takes_of_which_one_is_the_last(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its group would seem to be whole while another stage still reads its disk."""
    names = tuple(bytes([number]) for number in range(count))
    async with scene() as some:
        later, said = some.processes[1], list[StageFound]()
        assert isinstance(later, StageNode)
        monkeypatch.setattr(messages, "MAX_NAMES", 2)
        later._found = [(name, None) for name in names]
        later.up = said.append  # type: ignore[method-assign, assignment]
        await later._join_up(messages.StageOpen(later._introduction, 1, 0, 0, 0, ()))
        monkeypatch.undo()
        assert sum([each.names for each in said], ()) == names
        assert [each.last for each in said] == [False] * (len(said) - 1) + [True]


async def test_different_chunks_of_one_prompt_are_in_two_stages_at_once() -> None:
    meeting = Meeting()

    def prepare(some: Scene) -> None:
        for number, engine in enumerate(some.engines[:2]):
            engine.iteration, engine.attends = 1 - number, meeting.attend

    async with scene(prepare=prepare) as some:
        await some.answer("a", prompt_of(1, 200))  # four chunks


@pytest.mark.parametrize("at", range(1, STAGES))
async def test_what_befalls_an_attempt_in_a_later_stage_the_leader_hears(at: int) -> None:
    facts = [
        BlocksLost((b"x",)),
        Broken(A, "a seal did not match"),
        Gone(NodeId("decode-0"), "its session ended"),
    ]
    async with scene() as some:
        leader, later, told = some.processes[0], some.processes[at], list[Any]()
        leader._group._tell = told.append  # type: ignore[attr-defined]
        for fact in facts:
            later.fact(fact)
        await some.until(lambda: facts[-1] in told)
        assert [fact for fact in told if not isinstance(fact, Woken)] == facts


# What goes wrong.


@pytest.mark.parametrize("lost", range(STAGES))
async def test_a_group_ends_as_a_whole(lost: int) -> None:
    async with scene() as some:
        await some.answer("a", prompt_of(1, 100))
        some.processes[lost].end("killed")
        ends = await asyncio.gather(*some.ends[:STAGES])
        assert ends.pop(lost) == "killed"
        assert all("stopped by the head" in end or "session with" in end for end in ends)
        await some.until(lambda: P not in some.head.nodes())
        assert not some.ends[-1].done() and not list(some.head._groups.followers())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("at", [0, 1, STAGES - 1, STAGES])
async def test_a_process_whose_engine_fails_says_so(at: int) -> None:
    def fail() -> None:
        raise ValueError("broken")

    def prepare(some: Scene) -> None:
        some.engines[at].iteration, some.engines[at].attends = 0, fail

    async with scene(prepare=prepare) as some:
        some.head.submit(Job(RequestId("a"), prompt_of(1, 40), 10, Sampling(temperature=0.0)))
        with pytest.raises(StartError, match="the node failed: ValueError: broken"):
            await some.ends[at]


@pytest.mark.parametrize("gone", [1, 2])
async def test_a_group_forms_only_where_its_stages_reach_each_other(gone: int) -> None:
    words = ["cannot reach the next pipeline stage at nobody:1", "cannot reach the next stage at nobody:1"]
    made = Scene(None, MemoryNetwork())
    enter = made.head._groups.enter

    def elsewhere(stage: Any) -> None:
        if stage.hello.stage == gone:
            stage.hello = replace(stage.hello, address="nobody:1")
        enter(stage)

    made.head._groups.enter = elsewhere  # type: ignore[method-assign]
    started = asyncio.create_task(made.start())
    async with asyncio.timeout(60):
        await made.until(lambda: len(made.ends) > gone and made.ends[gone - 1].done())
        (end,) = await asyncio.gather(made.ends[gone - 1], return_exceptions=True)
        assert words[gone - 1] in str(end)
        started.cancel()
        await made.head.close()
        await asyncio.gather(*made.ends, started, return_exceptions=True)


# The leader's side alone.


class Leader:
    """A group of three, of which only this side is here: what it told, and what it said to the next stage."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.said: list[Any] = []
        self.group = Group(3, self.told.append, bool, bool, bool, lambda _, message: self.said.append(message))

    def hears(self, *messages: Any) -> None:
        for message in messages:
            self.group.on_message(None, message)  # type: ignore[arg-type]


def test_blocks_are_saved_when_every_stage_has_saved_them() -> None:
    """The leader may reuse the engine's blocks then. Two saves of one request are two."""
    leader, told = Leader(), list[Any]()
    for _ in range(2):
        leader.group.tell(Saved(A))
        leader.hears(StageSaved(2, A), StageSaved(2, A), StageSaved(1, B))
        assert leader.told == told
        leader.hears(StageSaved(1, A))
        told.append(Saved(A))
        assert leader.told == told
        leader.group.tell(Saved(A))
        assert leader.told == told
        leader.hears(StageSaved(1, A))
        leader.group.tell(Saved(B))
        leader.hears(StageSaved(2, B))
        told += [Saved(A), Saved(B)]
        assert leader.told == told and not leader.group._saves


def test_of_what_lies_on_the_disks_only_what_every_stage_has_is_of_use() -> None:
    leader = Leader()
    leader.hears(StageFound(1, (NAMES[0], NAMES[1])), StageFound(1, (NAMES[3],), last=True))
    assert not leader.group._formed.is_set()
    leader.hears(StageFound(2, (NAMES[0], NAMES[2], NAMES[3], NAMES[4]), last=True))
    assert leader.group._formed.is_set()
    found, useless = leader.group.common([(NAMES[0], None), (NAMES[1], NAMES[0]), (NAMES[4], None)])
    assert found == [(NAMES[0], None)]
    assert set(useless) == set(NAMES[1:]) and leader.said == [DropBlocks(useless)]


def deployment(*, curve: dict[str, Any] = kit.CURVE, **sections: Any) -> dict[str, Any]:
    """One group of emulated stages."""
    return emulated(curve, roles={"prefill": {"count": 2, "pipeline": 2}, "decode": 1}, **sections)


def alike(served: Client) -> bool:
    """All stages of the group keep as many blocks in each tier."""
    tiers = [served.gauge(f"cache_{tier}_blocks") for tier in ("memory", "disk")]
    return all(tier["prefill-0"] == tier["prefill-0.1"] for tier in tiers)


# What goes wrong.


def test_cancelled_prompts_leave_nothing_behind() -> None:
    with inside(deployment(cache={"dram": "64MiB"}, curve=STEADY)) as served:
        for seed in range(6):
            body = {"model": served.model, "prompt": kit.prompt_of(seed, 3000), "max_tokens": 20}
            with served.held(), pytest.raises(httpx.ReadTimeout):
                served.http.post("/v1/completions", json=body, timeout=0.05 + 0.06 * seed)
        ask(served, kit.prompt_of(0, 3000))


STORED = kit.prompt_of(4, 1600)


def on_disk(home: Path) -> dict[str, str]:
    return {"dram": "64MiB", "ssd": "64MiB", "folder": str(home / "blocks")}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a group left on its disks: the blocks of one prompt."""
    home = tmp_path_factory.mktemp("kept")
    with inside(deployment(cache=on_disk(home))) as served:
        assert ask(served, STORED) == 0
        served.wait_until(
            lambda: min(served.gauge("cache_disk_blocks")[f"prefill-0{part}"] for part in ("", ".1")) >= 100,
            "written behind",
        )
    return home / "blocks"


def lose_half(folder: Path) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]:
        os.truncate(path, len(path.read_bytes().rstrip(b"\0")) // 2)


@pytest.mark.parametrize(("stage", "harm"), [("prefill-0", lose_half), ("prefill-0.1", flip_bits)])
def test_damage_in_one_stage_costs_time_and_no_token(
    stage: str, harm: Callable[[Path], None], kept: Path, tmp_path: Path
) -> None:
    """A block that is missing in a later stage poisons what was begun with it; another attempt computes it."""
    shutil.copytree(kept, tmp_path / "blocks")
    harm(tmp_path / "blocks" / stage)
    with inside(deployment(cache=on_disk(tmp_path))) as served:
        assert ask(served, STORED) < 1599
        ask(served, STORED)
        assert ask(served, STORED) == 1599, "it was not stored again"
        served.wait_until(lambda: alike(served), "all stages keep the same blocks")
