"""What a configuration means to conductor and cost model: one reading for the live world and the simulated one."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from isthmus.conductor import LinkRule, Paths, Rules
from isthmus.config import Config, RoleConfig, RolesConfig
from isthmus.cost import Analytic, Cost, Hardware, curve_of, engine_coefficients, facts_of, hardware_named
from isthmus.cost.transfer import INT8, ZSTD
from isthmus.errors import ConfigError
from isthmus.scheduler import CPU_TILE, TILE, Chunking
from isthmus.types import NS_PER_MS, NS_PER_S, NodeId, Role

PROFILES = Path(__file__).parent / "cost" / "profiles"
"""Published measurements that `engine.cost` may name."""
UNLIMITED = 1 << 50
"""Bytes per second of a link that nobody asked to limit."""
CODECS = {"none": (), "lossless": (ZSTD,), "int8": (ZSTD, INT8)}
"""Those that a value of `network.compression` allows."""
_NUMBER = re.compile(r"[0-9]+e[+-]?[0-9]+", re.IGNORECASE)
_CODEC_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_COST_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def rules_of(config: Config) -> Rules:
    """The conductor's part of the configuration."""
    scheduling = config.scheduling
    return Rules(
        policy=config.policy,
        max_requests=config.limits.max_requests,
        max_attempts=config.limits.max_attempts,
        admission=scheduling.admission,
        reserve=scheduling.reserve,
        sticky_blocks=scheduling.sticky_blocks,
        balancing_threshold=scheduling.balancing_threshold,
        decode_s=scheduling.decode_s,
        load_limit=scheduling.load_limit,
        seed=scheduling.seed,
        replicate=scheduling.replication == "priced",
        codecs=CODECS[config.network.compression],
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        links=links_of(config),
        threshold=config.offload.threshold,
        priced=config.offload.routing == "priced",
        cache_mode=config.offload.cache,
        control=config.offload.control == "link",
        convert=config.offload.convert == "auto",
        cool_down_s=config.offload.cool_down_s,
        period_ns=int(config.offload.period_s * NS_PER_S),
    )


class Cluster(msgspec.Struct, frozen=True):
    """One cluster. `config`: the deployment's as it holds for the nodes here: `roles`, `engine.hardware`, `engine.gpus`
    and `engine.cost` are this cluster's. `name`: "" where the configuration names none."""

    name: str
    config: Config
    price: float = 1.0

    def node(self, role: Role, number: int) -> NodeId:
        return NodeId(f"{self.name}-{role}-{number}" if self.name else f"{role}-{number}")


def clusters_of(config: Config) -> list[Cluster]:
    """In the order of the configuration, which is also that of their nodes."""
    if not config.clusters:
        return [Cluster("", config)]
    found = []
    for name, cluster in config.clusters.items():
        own = {key: getattr(cluster, key) for key in ("hardware", "gpus", "cost")}
        engine = config.engine.model_copy(
            update={key: value for key, value in own.items() if value is not None}
        )
        roles = RolesConfig(**{role.value: getattr(cluster.roles, role.value) for role in Role})
        update = {"engine": engine, "roles": roles, "clusters": {}, "links": ()}
        found.append(Cluster(name, config.model_copy(update=update), cluster.price))
    return found


def links_of(config: Config) -> tuple[LinkRule, ...]:
    """Both directions of each."""
    found: list[LinkRule] = []
    for link in config.links:
        rate, rtt_ns = bytes_per_s(link.gbps, 0), int(link.rtt_ms * NS_PER_MS)
        (one, other) = link.between
        found += [LinkRule(one, other, rate, rtt_ns), LinkRule(other, one, rate, rtt_ns)]
    return tuple(found)


def at_home(config: Config, folder: Path) -> Config:
    """The same with each `cost` that names a file found from the folder of the configuration file."""

    def placed(section: Any) -> Any:
        if not isinstance(section.cost, str) or _shipped(section.cost).is_file():
            return section
        return section.model_copy(update={"cost": str(folder / Path(section.cost).expanduser())})

    clusters = {name: placed(cluster) for name, cluster in config.clusters.items()}
    return config.model_copy(update={"engine": placed(config.engine), "clusters": clusters})


def hardware_of(config: Config, nodes: RoleConfig) -> Hardware | None:
    """What nodes of a role run on, if the configuration says. Raises ConfigError for an unknown name."""
    name = nodes.hardware or config.engine.hardware
    return None if name is None else hardware_named(name)


def chunking_of(config: Config, nodes: RoleConfig) -> Chunking:
    """How nodes of a role cut prompts."""
    scheduling, hardware = config.scheduling, hardware_of(config, nodes)
    on_gpu = hardware is not None and hardware.name != "cpu"
    return Chunking(
        scheduling.partial_prefills,
        config.slo.tbt_ms if scheduling.chunking == "tbt" else None,
        TILE if on_gpu else CPU_TILE,
    )


def gpus_of(config: Config, nodes: RoleConfig) -> int:
    return nodes.gpus or config.engine.gpus


class Rates(msgspec.Struct, frozen=True):
    """One node's links in bytes per second. `handover`: its own rail for prefill to decode, 0 shares `network`."""

    network: int = UNLIMITED
    handover: int = 0
    memory: int = UNLIMITED
    disk_read: int = UNLIMITED
    disk_write: int = UNLIMITED

    def paths(self, *, has_disk: bool) -> Paths:
        """What the conductor hears of them, of a node with a cache."""
        rail = self.handover or (self.network if self.network >= UNLIMITED else 0)
        return Paths(self.network, self.memory, self.disk_read if has_disk else 0, rail)


def rates_of(config: Config, nodes: RoleConfig) -> Rates:
    """A group's links add up, as each of its machines moves its own layers."""
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    gpus, network = gpus_of(config, nodes), config.network
    return Rates(
        network=bytes_per_s(network.node_gbps, int(hardware.nic_bw * gpus)) * nodes.pipeline,
        handover=bytes_per_s(network.handover_gbps, 0) * nodes.pipeline,
        memory=int(hardware.pcie_bw * gpus) * nodes.pipeline,
        disk_read=int(hardware.ssd_read_bw) * nodes.pipeline,
        disk_write=int(hardware.ssd_write_bw) * nodes.pipeline,
    )


def codec_dtype(cost: Cost, otherwise: str = "") -> str:
    """Of the KV that a cost model speaks of, as codecs name it; "" for what they do not take."""
    return _CODEC_DTYPES.get(cost.kv_dtype, "") if isinstance(cost, Analytic) else otherwise


def bytes_per_s(gbps: float | None, otherwise: int) -> int:
    return otherwise if gbps is None else int(gbps * 1e9 / 8)


def cost_of(config: Config, nodes: RoleConfig, model: Path | None) -> Cost:
    """What work takes on a node of a role: a measured curve where there is one, else the analytic model of the
    model's config.json (`model`: its folder or the file) on its hardware, this CPU when none is named.

    Raises ConfigError for a curve, hardware or model without a cost.
    """
    engine = config.engine
    if engine.cost is not None:
        return curve_of(_curve_values(engine.cost))
    if model is None:
        raise ConfigError("engine.cost or model: give one; without it nobody knows what work costs")
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    facts = facts_of(read_mapping(model / "config.json" if model.is_dir() else model))
    weight_dtype = _COST_DTYPES[engine.dtype] if engine.dtype else facts.weight_dtype
    kv_dtype = "fp32" if weight_dtype == "fp32" else "bf16"
    coefficients = engine_coefficients(engine.runtime, hardware, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    return Analytic(
        model=facts,
        hardware=hardware,
        coefficients=coefficients,
        num_gpus=gpus_of(config, nodes),
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
    )


def _shipped(name: str) -> Path:
    """Where the profile of this name lies, if there is one."""
    return PROFILES / f"{name}.yaml"


def _curve_values(given: str | dict[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str):
        path = _shipped(given) if _shipped(given).is_file() else Path(given).expanduser()
        if not path.exists():
            names = sorted(each.stem for each in PROFILES.glob("*.yaml"))
            near = difflib.get_close_matches(path.name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: cannot be read: no such file, and no published profile{hint}")
        given = read_mapping(path)
    return {key: _numbers(value) for key, value in given.items()}


def _numbers(value: Any) -> Any:
    """YAML takes 1e-5, which is how JSON and Python write it, for a text; 1.0e-5 only for a number."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file with keys and values at its top. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not valid: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected keys and values at the top")
    return values
