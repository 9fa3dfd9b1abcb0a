"""Whether attention nodes pay: equal money, largest batches, and the reason in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config import Config, load_config
from isthmus.core.errors import ConfigError
from isthmus.lab.planner.decode import decode_batch, offload_of
from isthmus.lab.planner.fleet import Fleet, deployed, fleet_of
from isthmus.lab.planner.report import analytic
from isthmus.lab.planner.search import answer, needs
from isthmus.lab.planner.solve import Solver
from tests.lab.planner.fleets import SLOW, demand

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan" / "attention.yaml"


def example(**changed: Any) -> Fleet:
    return fleet_of(load_config(EXAMPLE, changed), EXAMPLE.parent)


def large(model: str = "models/llama-3-70b.json", memory: int = 4) -> Fleet:
    changed = {"roles.decode.gpus": 2, "roles.decode.price": 22.12, "roles.attention.count": memory}
    return example(model=model, **changed)


def by_hand(**roles: Any) -> Config:
    """A step of 10 ms and 1 ms a sequence, 1 us for a token of context, memory for 31 sequences of 1,000 tokens."""
    cost = SLOW | {"state_bytes": 0, "decode_context_s": 1e-6}
    given = {"prefill": 1, "decode": {"count": 1, "price": 2.0}, "attention": {"count": 2, "price": 0.5}}
    values = {
        "roles": given | roles,
        "engine": {"cost": cost, "kv_memory": "64MB", "max_sequences": 100, "batches": 2},
        "network": {"rtt_us": 0.0, "node_gbps": 1e9},
    }
    return Config.model_validate(values)


def test_two_h100_cost_about_as_much_as_one_and_two_h20() -> None:
    found = offload_of(example(), 1260)
    assert found is not None
    assert (found.alone.nodes, found.elsewhere.nodes) == ("1 x 2 h100", "1 h100 + 2 h20")
    assert (found.alone.price, round(found.elsewhere.price, 2)) == (22.12, 20.32)
    assert found.ratio > 1.1 and "Memory-bound" in found.reason
    assert 2 < found.elsewhere.batch / found.alone.batch < 2.6


def test_it_pays_for_long_contexts_and_not_where_computing_binds() -> None:
    short, long = offload_of(large(), 300), offload_of(large(), 12_000)
    assert short is not None and long is not None
    assert short.ratio < 1 < long.ratio
    assert short.elsewhere.compute_bound and "Compute-bound" in short.reason


def test_memory_decides_the_batch_and_prices_the_rest() -> None:
    fleet = fleet_of(by_hand())
    alone = decode_batch(fleet.home.decode, 1000, None)
    elsewhere = decode_batch(fleet.home.decode, 1000, None, fleet.home.attending)
    assert (alone.size, elsewhere.size) == (31, 63)
    found = offload_of(fleet, 1000)
    assert found is not None and found.alone.nodes == "2 decode nodes", "3 buy 1.5 nodes of 2"
    assert found.elsewhere.price == 3.0
    # Two batches of 32 take turns: 42 ms each, while the other's attention takes 16 ms on two nodes.
    assert (found.elsewhere.turns, found.elsewhere.step_ms) == (2, pytest.approx(84))
    assert found.elsewhere.per_price == pytest.approx(3600 * 63 / 0.084 / 3.0)
    assert "takes none of its time" in found.reason


def test_attention_nodes_are_counted_in_cost_and_growth() -> None:
    config = by_hand()
    fleet = fleet_of(config)
    assert fleet.priced and fleet.cost == 1.0 + 2.0 + 2 * 0.5
    assert fleet.home.fixed and any("attention nodes hold" in note for note in fleet.notes)
    solver = Solver(fleet, demand([900], 200))
    rate = solver.best(solver.shape, "exact").decode  # type: ignore[arg-type]
    twice = needs(solver, 2 * rate)
    assert (twice.decode, twice.attention) == (2, 4)
    assert twice.cost == (twice.prefill + 2) * 1.5 + 4 * 0.5


def test_the_answer_has_it_and_what_is_simulated_too() -> None:
    config = by_hand()
    found = answer(config, fleet_of(config), demand([900], 200))
    assert found.attention is not None and found.clusters[0].attention == 2
    assert any(sheet.title == "Attention on nodes of its own" for sheet in analytic(found))
    assert deployed(config, found.plans[0], "").roles.attention.count == 2
    plain = config.model_copy(
        update={"roles": config.roles.model_copy(update={"attention": config.roles.mixed})}
    )
    assert answer(plain, fleet_of(plain), demand([900], 200)).attention is None


def test_batches_are_as_configured() -> None:
    one = fleet_of(by_hand().model_copy(update={"engine": by_hand().engine.model_copy(update={"batches": 1})}))
    found = decode_batch(one.home.decode, 1000, None, one.home.attending)
    # One batch of 63 waits: 73 ms of layers and 31.5 ms of attention on two nodes.
    assert found.step_s == pytest.approx(0.1045)
    many = fleet_of(by_hand().model_copy(update={"engine": by_hand().engine.model_copy(update={"batches": 8})}))
    assert decode_batch(many.home.decode, 1000, None, many.home.attending).step_s == pytest.approx(0.084)


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ({"mixed": 1}, "roles.attention: is planned beside decode nodes"),
        ({"decode": 0, "mixed": 2}, "roles.attention: is planned beside decode nodes"),
        ({"decode": 1}, "roles.decode.price: attention nodes have one"),
        ({"attention": 2}, "roles.attention.price: decode nodes have one"),
    ],
)
def test_what_cannot_be_planned(roles: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_of(by_hand(**roles))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_where_no_price_is_given_it_says_so() -> None:
    said = "no prices are given: every node costs 1"
    assert said in fleet_of(by_hand(decode=1, attention=2)).notes and said not in fleet_of(by_hand()).notes
