"""`isthmus bench engine`, `messenger` and `store`, with other people's software as further sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.options import SIZE, SIZES, ModelFolder, MooncakePython, Rounds
from isthmus.bench.store import Blocks, BlockStore
from isthmus.bench.study import Outcome, Report
from isthmus.bench.transfer_peers import Direction

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class EnginePlan:
    model: ModelFolder
    dtype: Annotated[str | None, Option(help="float32 or bfloat16; default: the model's.")] = None
    threads: Annotated[int | None, Option(min=1, help="Threads of both sides.")] = None
    rounds: Rounds = 3


def engine(plan: EnginePlan, report: Report) -> Outcome:
    """`isthmus bench engine`, beside transformers on the same model."""
    from benchmarks.peers.transformers import Transformers
    from isthmus.bench import engine as bench

    ours = bench.Ours(plan.model, plan.dtype, plan.threads)
    others = {"transformers": Transformers(plan.model, plan.dtype or ours.dtype)}
    return bench.run(ours, others, plan.rounds, report)


@dataclass(frozen=True)
class MessengerPlan:
    direction: Annotated[Direction, Option(help="pull: a request answered by a push.")] = Direction.PUSH
    sizes: Annotated[tuple[int, ...], SIZES, Option(help="Bytes of a transfer.")] = (MIB, 16 * MIB, 1024 * MIB)
    rounds: Rounds = 5
    mooncake_python: MooncakePython = None


def messenger(plan: MessengerPlan, report: Report) -> Outcome:
    """`isthmus bench messenger`, beside Mooncake's transfer engine."""
    from benchmarks.peers.mooncake import MooncakeEngine, find_mooncake
    from isthmus.bench import messenger as bench

    python = find_mooncake(plan.mooncake_python)
    with closing(MooncakeEngine(python, max(plan.sizes))) as mooncake:
        both = bench.Plan(plan.direction, plan.sizes, rounds=plan.rounds)
        return bench.run(both, report, {"mooncake": mooncake})


@dataclass(frozen=True)
class StorePlan:
    sizes: Annotated[tuple[int, ...], SIZES, Option(help="Bytes of a block.")] = (256 * KIB, MIB, 16 * MIB)
    total: Annotated[int, SIZE, Option(help="Bytes of all blocks of a case.")] = 256 * MIB
    rounds: Rounds = 5
    folder: Annotated[Path | None, Option(help="An existing folder on the SSD.")] = None
    mooncake_python: MooncakePython = None


def store(plan: StorePlan, report: Report) -> Outcome:
    """`isthmus bench store`, beside the Mooncake store."""
    from benchmarks.peers.mooncake import find_mooncake
    from isthmus.bench import store as bench

    python = find_mooncake(plan.mooncake_python)
    both = bench.Plan(plan.sizes, plan.total, plan.rounds, plan.folder)
    return bench.run(both, report, partial(_stores, python))


@contextmanager
def _stores(python: str, blocks: Blocks) -> Iterator[Mapping[str, BlockStore]]:
    from benchmarks.peers.mooncake import MooncakeStore

    start = partial(MooncakeStore, python, blocks.size, blocks.count)
    with closing(start(remote=False)) as own, closing(start(remote=True)) as remote:
        yield {"mooncake": own, "mooncake_remote": remote}
