"""What there is to plan with: the instances of a home cluster, of those that prefill for it, and the links between.

An instance is a node of the configuration: a replica of the model on its accelerators.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.config import Config
from isthmus.cost import compile_cost
from isthmus.cost.transfer import INT8, ZSTD, codec_speeds
from isthmus.deploy import Cluster, NodeFacts, at_home, clusters_of, cost_of, role_config, role_facts
from isthmus.errors import ConfigError
from isthmus.sim.deployment import deployment_of
from isthmus.sim.workloads.workload import PLAIN_BLOCK_SIZE
from isthmus.types import Role

_PS_PER_S = 1e12


def step_s(facts: NodeFacts, batch: int, context: float) -> float:
    """One decode step of `batch` sequences of `context` tokens each, in seconds."""
    fixed, per_token = compile_cost(facts.cost).decode_step_ps(batch)
    return (fixed + per_token * batch * context) / _PS_PER_S


class Home(msgspec.Struct, frozen=True):
    """The cluster where requests decode. `nodes`: instances to be split between prefill and decode.

    `configured`: of them, prefill nodes in the configuration; `fixed`: they cannot become decode nodes, since the
    two roles run on different hardware; `mixed`: some did both there. `price`: of an instance.
    """

    name: str
    nodes: int
    configured: int
    fixed: bool
    mixed: bool
    price: float
    prefill: NodeFacts
    decode: NodeFacts


class Remote(msgspec.Struct, frozen=True):
    """A cluster that prefills for the home. `egress`: bytes per second of its link to there; `rtt_s`: of that link."""

    name: str
    nodes: int
    price: float
    prefill: NodeFacts
    egress: float
    rtt_s: float


class Fleet(msgspec.Struct, frozen=True):
    """`priced`: the configuration gives prices. `ttft_ms`, `tbt_ms`: its limits, None for no limit.

    `codec`: what KV may be encoded with on the link.
    """

    home: Home
    remotes: tuple[Remote, ...]
    priced: bool
    ttft_ms: int | None
    tbt_ms: int | None
    codec: str
    notes: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.home.nodes + sum(remote.nodes for remote in self.remotes)

    @property
    def cost(self) -> float:
        """Of all instances, in the unit of the prices."""
        return self.home.nodes * self.home.price + sum(each.nodes * each.price for each in self.remotes)


def fleet_of(config: Config, folder: Path = Path()) -> Fleet:
    """The fleet of a configuration; paths in it are relative to `folder`.

    Raises ConfigError where there is not exactly one cluster that decodes, where another has no link to it, and for
    what cannot be simulated or what the equations do not speak of.
    """
    clusters = clusters_of(at_home(config, folder))
    home = _home_of(clusters)
    found = _home(home)
    remotes = tuple(_remote(config, each, home.name) for each in clusters if each is not home)
    deployment_of(config, PLAIN_BLOCK_SIZE, folder)  # what cannot be simulated is not planned either
    notes = (
        []
        if not home.config.roles.mixed.count
        else [f"{_named(home)}mixed nodes are planned as nodes that either prefill or decode"]
    )
    if found.fixed:
        notes.append(
            f"{_named(home)}prefill and decode nodes differ in hardware, so the split is as configured"
        )
    if remotes and config.network.compression != "none":
        notes.append(
            "the equations take all KV on a link as encoded; a running cluster encodes what a link would be waited for"
        )
    return Fleet(
        home=found,
        remotes=remotes,
        priced=any("price" in cluster.model_fields_set for cluster in config.clusters.values()),
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        codec=config.network.compression,
        notes=tuple(notes),
    )


def kept(instance: NodeFacts, codec: str) -> float:
    """Bytes that cross a link for each byte of an instance's KV; recurrent states are never encoded with loss.

    Raises ConfigError for `codec` other than `none` where nothing says of what the KV consists.
    """
    name = {"lossless": ZSTD, "int8": INT8}.get(codec)
    if name is None:
        return 1.0
    if not instance.kv_dtype:
        raise ConfigError(f"network.compression: {codec} cannot encode KV that is 8-bit already; take none")
    return codec_speeds(instance.kv_dtype, instance.block_size)[name].kept


def _home_of(clusters: list[Cluster]) -> Cluster:
    decoding = [each for each in clusters if each.config.roles.decode.count or each.config.roles.mixed.count]
    if not decoding:
        where = "clusters" if clusters[0].name else "roles"
        raise ConfigError(f"{where}: no cluster decodes; give one of them decode nodes")
    if len(decoding) > 1:
        names = ", ".join(each.name for each in decoding)
        raise ConfigError(
            f"clusters: {names} all decode; a plan has one home and clusters that only prefill for it: plan each home"
        )
    return decoding[0]


def _home(cluster: Cluster) -> Home:
    roles = cluster.config.roles
    for role in Role:
        _check_alone(cluster, role)
    prefill, decode = _instance(cluster, Role.PREFILL), _instance(cluster, Role.DECODE)
    nodes = roles.prefill.count + roles.decode.count + roles.mixed.count
    if nodes < 2 and not cluster.name:
        raise ConfigError("roles: one node cannot be split; plan with at least 2")
    same = (roles.prefill.hardware, roles.prefill.gpus) == (roles.decode.hardware, roles.decode.gpus)
    return Home(
        name=cluster.name,
        nodes=nodes,
        configured=roles.prefill.count,
        fixed=not same,
        mixed=roles.mixed.count > 0,
        price=cluster.price,
        prefill=prefill,
        decode=decode,
    )


def _remote(config: Config, cluster: Cluster, home: str) -> Remote:
    link = next((each for each in config.links if set(each.between) == {cluster.name, home}), None)
    if link is None:
        raise ConfigError(
            f"links: no link joins {cluster.name} and {home}, so nothing prefilled there can be decoded; "
            "give it one, or leave the cluster out"
        )
    if not cluster.config.roles.prefill.count:
        raise ConfigError(f"clusters.{cluster.name}.roles: no node; give it prefill nodes or leave it out")
    _check_alone(cluster, Role.PREFILL)
    instance = _instance(cluster, Role.PREFILL)
    count = cluster.config.roles.prefill.count
    return Remote(cluster.name, count, cluster.price, instance, link.gbps * 1e9 / 8, link.rtt_ms / 1000)


def _check_alone(cluster: Cluster, role: Role) -> None:
    if role_config(cluster.config, role).pipeline > 1:
        raise ConfigError(
            f"{_named(cluster)}roles.{role}.pipeline: the equations know nodes that work alone; plan with pipeline 1"
        )


def _instance(cluster: Cluster, role: Role) -> NodeFacts:
    """One node of a role as it would be, also where the configuration has none yet."""
    config = cluster.config
    model = Path(config.model) if config.model else None
    cost = cost_of(config, role_config(config, role), model)
    return role_facts(cluster, role, cost, PLAIN_BLOCK_SIZE)


def _named(cluster: Cluster) -> str:
    return f"clusters.{cluster.name}: " if cluster.name else ""
