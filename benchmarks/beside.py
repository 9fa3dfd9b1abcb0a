"""`isthmus bench engine`, `messenger` and `store`, with other people's software as further sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.options import MooncakePython
from benchmarks.peers.mooncake import MooncakeEngine, MooncakeStore, find_mooncake
from isthmus.bench import engine as bench_engine
from isthmus.bench import messenger as bench_messenger
from isthmus.bench import store as bench_store
from isthmus.bench.study import Outcome, Report


def engine(plan: bench_engine.Plan, report: Report) -> Outcome:
    """`isthmus bench engine`, beside transformers on the same model."""
    from benchmarks.peers.transformers import Transformers

    return bench_engine.run(plan, report, lambda dtype: {"transformers": Transformers(plan.model, dtype)})


@dataclass(frozen=True)
class MessengerPlan(bench_messenger.Plan):
    mooncake_python: MooncakePython = None


def messenger(plan: MessengerPlan, report: Report) -> Outcome:
    """`isthmus bench messenger`, beside Mooncake's transfer engine."""
    with closing(MooncakeEngine(find_mooncake(plan.mooncake_python), max(plan.sizes))) as mooncake:
        return bench_messenger.run(plan, report, {"mooncake": mooncake})


@dataclass(frozen=True)
class StorePlan(bench_store.Plan):
    mooncake_python: MooncakePython = None


def store(plan: StorePlan, report: Report) -> Outcome:
    """`isthmus bench store`, beside the Mooncake store."""
    return bench_store.run(plan, report, partial(_stores, find_mooncake(plan.mooncake_python)))


@contextmanager
def _stores(python: str, blocks: bench_store.Blocks) -> Iterator[Mapping[str, bench_store.BlockStore]]:
    start = partial(MooncakeStore, python, blocks.size, blocks.count)
    with closing(start(remote=False)) as own, closing(start(remote=True)) as remote:
        yield {"mooncake": own, "mooncake_remote": remote}
