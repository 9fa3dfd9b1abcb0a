"""Both worlds read the same facts from a configuration: what `serve` and `node` run is what `simulate` and `plan`
speak of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.cli.engines import kv_layout, node_facts
from isthmus.cli.models import bytes_folder
from isthmus.config import Config, load_config
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.facts import ClusterPlace, NodeFacts, at_home, nodes_of, places_of
from isthmus.lab.planner.fleet import fleet_of
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE
from tests.live.engine.hybrids import save_tiny

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ("kubernetes", "route"))
assert FILES
HORIZON = ("max_steps", "max_chunks")
"""How far a scheduler plans ahead, which changes no result: a simulated one does so without limit."""


def example(file: Path) -> Config:
    """With the model of bytes where the file names none, and emulated where it is of machines that are not here."""
    config = at_home(load_config(file, {}), file.parent)
    overrides: dict[str, Any] = {"model": config.model or str(bytes_folder())}
    clusters = config.clusters.values()
    if config.engine.hardware or config.engine.cost or any(each.hardware or each.cost for each in clusters):
        overrides["engine"] = config.engine.model_copy(update={"kind": "emulated"})
    return config.model_copy(update=overrides)


def live(config: Config) -> tuple[NodeFacts, ...]:
    """As `serve` reads them; each node's process, told its cluster's configuration as JSON, reads the same."""
    assert config.model is not None
    folder = Path(config.model)
    found = nodes_of(config, config.engine.block_size, model=folder, layout=kv_layout(config, folder))
    for place, facts in zip(places_of(config), found, strict=True):
        told = Config.model_validate_json(place.cluster.config.model_dump_json(exclude_unset=True))
        assert node_facts(ClusterPlace(place.cluster.name, told), place.role, folder, place.node) == facts
    return found


def fields(facts: NodeFacts) -> dict[str, Any]:
    """All that is said of a node, for either world to compare."""
    limits = [msgspec.to_builtins(facts.limits(role)) for role in Role]
    for each in limits:
        assert all(each.pop(name) for name in HORIZON)
    made = {name: getattr(facts, name) for name in facts.__struct_fields__ if name not in HORIZON}
    return made | {"limits": limits, "joined": facts.joined(), "target": facts.target is None}


def assert_same_facts(config: Config) -> tuple[NodeFacts, ...]:
    ours = live(config)
    theirs = deployment_of(config, config.engine.block_size).nodes
    assert [fields(facts) for facts in ours] == [fields(facts) for facts in theirs]
    return ours


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(EXAMPLES)) for file in FILES])
def test_an_example_means_the_same_in_both_worlds(file: Path) -> None:
    assert assert_same_facts(example(file))


CURVE = {"kv_token_bytes": 1000, "num_layers": 6, "prefill_token_s": 1e-4, "decode_fixed_s": 0.01}
STATES = CURVE | {"state_bytes": 40_000}
TWO = {
    "clusters": {"far": {"roles": {"prefill": 2}}, "near": {"roles": {"prefill": 1, "decode": 2}}},
    "links": [{"between": ["far", "near"], "gbps": 8}],
}
EMULATED: dict[str, Any] = {"kind": "emulated", "cost": CURVE, "kv_memory": "100MB"}
CACHE = {"dram": "50MB", "ssd": "70MB", "folder": "blocks"}
LIMITS = {"prefill": {"count": 1, "max_sequences": 3}, "decode": {"count": 2, "max_sequences": 20}}


def changed(**sections: Any) -> dict[str, Any]:
    return {"engine": EMULATED} | sections


GENERATED: dict[str, dict[str, Any]] = {
    "torch": {"cache": CACHE},
    "torch float32": {"engine": {"dtype": "float32"}, "cache": CACHE},
    "torch pipeline": {"roles": {"prefill": {"count": 4, "pipeline": 2}, "decode": 1}, "cache": CACHE},
    "plain": changed(),
    "caches": changed(cache=CACHE, roles={"prefill": 1, "decode": 2, "mixed": 1}),
    "dram alone": changed(cache={"dram": "50MB"}, network={"node_gbps": 10, "handover_gbps": 25}),
    "pipeline": changed(roles={"prefill": {"count": 4, "pipeline": 4}, "decode": 1}, cache=CACHE),
    "clusters": changed(**TWO, cache=CACHE),
    "convert": changed(**TWO, offload={"convert": "auto"}),
    "states": changed(engine=EMULATED | {"cost": STATES}, roles=LIMITS, cache=CACHE),
    "states, convert": changed(
        engine=EMULATED | {"cost": STATES}, roles=LIMITS, offload={"convert": "auto"}, cache=CACHE
    ),
    "states, pipeline": changed(
        engine=EMULATED | {"cost": STATES}, roles={"prefill": {"count": 2, "pipeline": 2}, "decode": 1}
    ),
    "weights": {"engine": {"kind": "emulated", "hardware": "h200", "gpus": 2}},
    "weights on a CPU": {"engine": {"kind": "emulated", "hardware": "cpu"}},
    "limits": changed(
        engine=EMULATED | {"prompt_batch": 1, "token_budget": 96, "batches": 2},
        slo={"tbt_ms": 50},
        scheduling={"chunking": "tbt", "partial_prefills": 2},
    ),
}


def generated(name: str) -> Config:
    return Config.model_validate({"model": str(bytes_folder())} | GENERATED[name])


@pytest.mark.parametrize("name", GENERATED)
def test_options_mean_the_same_in_both_worlds(name: str) -> None:
    assert assert_same_facts(generated(name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_latent_models_layout_is_what_its_costs_say(dtype: str, tmp_path: Path) -> None:
    model = str(save_tiny("deepseek_v3", tmp_path))
    assert_same_facts(load_config(None, {"model": model, "engine.dtype": dtype, "cache.dram": "8MiB"}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_a_layout_is_exact_where_costs_are_not(family: str, dtype: str, tmp_path: Path) -> None:
    """The engine keeps all of a recurrent state as float32. The costs count the inputs of its convolutions with 16
    bits, as published, or not at all, so a simulated node has room for a few blocks more."""
    model = str(save_tiny(family, tmp_path))
    config = load_config(None, {"model": model, "engine.dtype": dtype, "cache.dram": "8MiB"})
    ours, theirs = live(config)[0], deployment_of(config, 16).nodes[0]
    assert ours.state_blocks and 0 < theirs.kv_blocks - ours.kv_blocks < 0.001 * ours.kv_blocks
    states = {"kv_blocks": ours.kv_blocks, "state_blocks": ours.state_blocks}
    assert fields(msgspec.structs.replace(theirs, **states)) == fields(ours)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(EXAMPLES)) for file in FILES])
def test_a_plan_speaks_of_the_same_nodes(file: Path) -> None:
    config = example(file)
    try:
        fleet = fleet_of(config)
    except ConfigError:
        pytest.skip("the equations do not speak of it")
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"block_size": PLAIN_BLOCK_SIZE})}
    )
    planned = [fleet.home.prefill, fleet.home.decode, *(remote.prefill for remote in fleet.remotes)]
    known = {(facts.cluster, facts.role): fields(facts) for facts in live(config)}
    for facts in planned:
        found = known.get((facts.cluster, facts.role))
        named = facts if found is None else msgspec.structs.replace(facts, node=found["node"])
        assert found is None or fields(named) == found
