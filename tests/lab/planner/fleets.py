"""Small fleets and demands that tests plan with."""

from __future__ import annotations

from typing import Any

from isthmus.config import Config
from isthmus.core.cost.lengths import Sample
from isthmus.lab.planner.demand import Demand
from isthmus.lab.planner.fleet import Fleet, fleet_of

FAST = {
    "kv_token_bytes": 2000,
    "num_layers": 2,
    "state_bytes": 10**6,
    "prefill_fixed_s": 0.1,
    "prefill_token_s": 1e-5,
}
SLOW = {
    "kv_token_bytes": 2000,
    "num_layers": 2,
    "state_bytes": 10**6,
    "prefill_fixed_s": 0.05,
    "prefill_token_s": 5e-5,
    "decode_fixed_s": 0.01,
    "decode_sequence_s": 0.001,
    "decode_context_s": 1e-9,
}


def config(*, remote: int = 2, prefill: int = 2, decode: int = 2, gbps: float = 1.0, **changed: Any) -> Config:
    """A home on slow nodes and, unless it has no nodes, a remote cluster on fast ones. `changed`: further sections."""
    values: dict[str, Any] = {
        "clusters": {"home": {"cost": SLOW, "roles": {"prefill": prefill, "decode": decode}}},
        "engine": {"kv_memory": "1GB", "token_budget": 65_536, "prompt_batch": 1},
        "slo": {"tbt_ms": 40, "ttft_ms": 10_000},
        "offload": {"control": "none"},
    }
    if remote:
        values["clusters"]["remote"] = {"cost": FAST, "roles": {"prefill": remote}}
        values["links"] = [{"between": ["remote", "home"], "gbps": gbps}]
    return Config.model_validate(values | changed)


def fleet(**changed: Any) -> Fleet:
    return fleet_of(config(**changed))


def demand(lengths: list[int], output_tokens: float = 100.0) -> Demand:
    return Demand("by hand", Sample(lengths), 0.0, output_tokens)
