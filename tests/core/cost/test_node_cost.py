"""A cost travels in messages and comes back the same."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.core.cost import Cost, Curve, compile_cost
from tests.core.cost.models import CONFIGS, instance

COSTS: list[Cost] = [instance(config) for config in CONFIGS.values()] + [Curve(1024, 2, 1e-5)]


@pytest.mark.parametrize("cost", COSTS)
def test_it_survives_the_wire(cost: Cost) -> None:
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(cost), type=Cost)
    assert back == cost
    assert compile_cost(back).step_ps([(512, 100)], 7, 9000) == compile_cost(cost).step_ps(
        [(512, 100)], 7, 9000
    )


def test_an_evaluator_knows_its_kv() -> None:
    node = compile_cost(instance(CONFIGS["qwen-next"]))
    assert (node.kv_token_bytes, node.num_layers) == (12_288, 48)
    assert node.state_bytes == instance(CONFIGS["qwen-next"]).state_bytes > 0
    assert compile_cost(Curve(1024, 2, 1e-5)).state_bytes == 0
