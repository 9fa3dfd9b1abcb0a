"""What the decision benchmark feeds the conductor, on a small cluster."""

from __future__ import annotations

import random

import msgspec
import pytest

from isthmus.benchmarks import conductor
from isthmus.benchmarks.conductor import Cluster, Load
from isthmus.errors import ConfigError
from isthmus.types import Role

SMALL = Load(num_nodes=6, num_blocks=20_000, prompt_blocks=100, num_decisions=300)
ROLES = [Role.PREFILL] * 3 + [Role.DECODE] * 3


def test_the_index_is_filled_and_kept() -> None:
    cluster = Cluster(SMALL, ROLES)
    index = cluster.conductor.view.index
    assert index.num_blocks >= SMALL.num_blocks
    cluster.play("small")
    cluster.conductor.check()
    assert index.num_blocks >= SMALL.num_blocks


def test_all_that_follows_is_told() -> None:
    cluster = Cluster(SMALL, ROLES)
    found = cluster.play("small")
    assert found.decisions == 300
    assert found.decisions_per_s == pytest.approx(1e6 / found.mean_us)
    assert found.p50_us <= found.p99_us <= found.max_us
    assert found.queued > 0
    assert found.copying > 0
    assert found.fetches > 0
    assert 0.1 < found.matched_share < 0.9
    view = cluster.conductor.view
    assert found.events > 3 * (found.decisions - len(view.requests))
    assert all(request.copy is None for request in view.requests.values() if not request.prefilling)


def test_the_same_seed_gives_the_same_decisions() -> None:
    def counts(seed: int) -> tuple[int, int, float]:
        found = Cluster(msgspec.structs.replace(SMALL, seed=seed), ROLES).play("small")
        return found.fetches, found.events, found.matched_share

    assert counts(1) == counts(1) != counts(2)


def test_names_are_new_objects_each_time() -> None:
    names = conductor._fresh(random.Random(1), 3)
    first, second = conductor._split(names), conductor._split(names)
    assert first == second
    assert len(set(first)) == 3
    assert all(one is not other for one, other in zip(first, second, strict=True))


def test_both_layouts_are_run_and_shown() -> None:
    lines: list[str] = []
    found = conductor.run(msgspec.structs.replace(SMALL, num_decisions=20), lines.append)
    assert [timing.layout for timing in found] == ["3 prefill, 3 decode", "6 mixed"]
    assert len(lines) == 4
    assert conductor.table(found).row_count == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nodes": 1}, "--nodes 1: at least 2"),
        ({"prompt_blocks": 64}, "--prompt-blocks 64: more than 64"),
        ({"num_blocks": 100}, "--blocks 100: at least ten prompts"),
        ({"num_decisions": 0}, "--decisions 0: at least 1"),
    ],
)
def test_a_load_without_sense_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**fields)
