"""A plan as a configuration: what the simulator runs, and what an operator would write."""

from __future__ import annotations

from pathlib import Path

import msgspec

from isthmus.config import NO_NODES, ClusterConfig, Config, RoleConfig, RolesConfig
from isthmus.core.cost import Analytic, compile_cost
from isthmus.core.cost.transfer import INT8, ZSTD
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.facts import ClusterPlace, NodeFacts, at_home, clusters_of, cost_of, role_config, role_facts
from isthmus.lab.planner.answer import DeploymentPlan
from isthmus.lab.sim.deployment import deployment_of
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE

NEVER = 1 << 40
"""A threshold that no prompt is longer than: nothing is offloaded."""


def deployed(config: Config, plan: DeploymentPlan, home: str) -> Config:
    """The configuration with the plan's nodes and threshold. `home`: the name of the home cluster, "" of the only one.

    A plan without remote clusters becomes a configuration of one cluster: the home's nodes, and no link.
    """
    if not plan.remote:
        [only] = [each for each in clusters_of(config) if each.name == home]
        roles = only.config.roles
        split = RolesConfig(
            prefill=_count(roles.prefill, plan.prefill),
            decode=_count(roles.decode, plan.decode),
            attention=roles.attention,
        )
        return only.config.model_copy(update={"roles": split})
    clusters = dict(config.clusters)
    own = clusters[home].roles
    clusters[home] = _with_roles(
        clusters[home], _count(own.prefill, plan.prefill), _count(own.decode, plan.decode)
    )
    for name, nodes in plan.remote.items():
        clusters[name] = _with_roles(clusters[name], _count(clusters[name].roles.prefill, nodes), NO_NODES)
    threshold = NEVER if plan.threshold is None else plan.threshold
    return config.model_copy(
        update={
            "clusters": clusters,
            "offload": config.offload.model_copy(update={"threshold": threshold}),
        }
    )


def _count(nodes: RoleConfig, count: int) -> RoleConfig:
    return nodes.model_copy(update={"count": count})


def _with_roles(cluster: ClusterConfig, prefill: RoleConfig, decode: RoleConfig) -> ClusterConfig:
    return cluster.model_copy(update={"roles": RolesConfig(prefill=prefill, decode=decode)})


# What there is to plan with: the instances of a home cluster, of those that prefill for it, and the links between.
#
# An instance is a node of the configuration: a replica of the model on its accelerators.


_PS_PER_S = 1e12


def step_s(facts: NodeFacts, batch: int, context: float) -> float:
    """One decode step of `batch` sequences of `context` tokens each, in seconds."""
    fixed, per_token = compile_cost(facts.cost).decode_step_ps(batch)
    return (fixed + per_token * batch * context) / _PS_PER_S


class AttentionPool(msgspec.Struct, frozen=True):
    """Nodes that hold the KV of all that decodes, and attend to it. `share`: of them for each decode node. `price`: of
    one; `decode_price`: of a decode node.

    `alone`: what a decode node and its share would buy of the decode nodes' accelerators, as so many copies of a node.
    """

    nodes: int
    share: float
    price: float
    decode_price: float
    facts: NodeFacts
    alone: tuple[tuple[int, NodeFacts], ...]


class Home(msgspec.Struct, frozen=True):
    """The cluster where requests decode. `nodes`: instances to be split between prefill and decode.

    `configured`: of them, prefill nodes in the configuration; `fixed`: they cannot become decode nodes, since the
    two roles run on different hardware; `mixed`: some did both there. `price`: of an instance, the mean where roles
    have prices of their own. `attending`: beside them, if there are any.
    """

    name: str
    nodes: int
    configured: int
    fixed: bool
    mixed: bool
    price: float
    prefill: NodeFacts
    decode: NodeFacts
    attending: AttentionPool | None = None

    @property
    def beside_cost(self) -> float:
        """Of attention nodes, in the unit of the prices."""
        return self.attending.nodes * self.attending.price if self.attending else 0.0


class RemotePrefill(msgspec.Struct, frozen=True):
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
    remotes: tuple[RemotePrefill, ...]
    priced: bool
    ttft_ms: int | None
    tbt_ms: int | None
    codec: str
    notes: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """That prefill or decode."""
        return self.home.nodes + sum(remote.nodes for remote in self.remotes)

    @property
    def cost(self) -> float:
        """Of all instances, in the unit of the prices."""
        remote = sum(each.nodes * each.price for each in self.remotes)
        return self.home.nodes * self.home.price + self.home.beside_cost + remote


def fleet_of(config: Config, folder: Path = Path()) -> Fleet:
    """The fleet of a configuration; paths in it are relative to `folder`.

    Raises ConfigError where there is not exactly one cluster that decodes, where another has no link to it, and for
    what cannot be simulated or what the equations do not speak of.
    """
    clusters = clusters_of(at_home(config, folder))
    home = _home_of(clusters)
    found = _home(home)
    if found.attending is not None and len(clusters) > 1:
        raise ConfigError("clusters: attention nodes are planned for one cluster; leave the others out")
    remotes = tuple(_remote(config, each, home.name) for each in clusters if each is not home)
    deployment_of(config, PLAIN_BLOCK_SIZE, folder)  # what cannot be simulated is not planned either
    notes = (
        []
        if not home.config.roles.mixed.count
        else [f"{_named(home)}mixed nodes are planned as nodes that either prefill or decode"]
    )
    if found.fixed and found.attending is None:
        notes.append(
            f"{_named(home)}prefill and decode nodes differ in hardware, so the split is as configured"
        )
    if found.attending is not None:
        notes.append(
            "attention nodes hold the KV of the decode nodes as configured, so the split is as configured; what "
            "prompts take of their memory and time is not asked"
        )
        if not _is_priced(config):
            notes.append("no prices are given: every node costs 1")
    if remotes and config.network.compression != "none":
        notes.append(
            "the equations take all KV on a link as encoded; a running cluster encodes what a link would be waited for"
        )
    return Fleet(
        home=found,
        remotes=remotes,
        priced=_is_priced(config),
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        codec=config.network.compression,
        notes=tuple(notes),
    )


def _is_priced(config: Config) -> bool:
    clusters = config.clusters.values()
    roles = [
        getattr(each, role.value) for each in (config.roles, *(one.roles for one in clusters)) for role in Role
    ]
    return any("price" in each.model_fields_set for each in (*clusters, *roles))


def kept(instance: NodeFacts, codec: str) -> float:
    """Bytes that cross a link for each byte of an instance's KV; recurrent states are never encoded with loss.

    Raises ConfigError for `codec` other than `none` where nothing says of what the KV consists.
    """
    name = {"lossless": ZSTD, "int8": INT8}.get(codec)
    if name is None:
        return 1.0
    if not instance.kv_dtype:
        raise ConfigError(f"network.compression: {codec} cannot encode KV that is 8-bit already; take none")
    return instance.cost.handling.speeds(instance.kv_dtype, instance.block_size)[name].kept


def _home_of(clusters: list[ClusterPlace]) -> ClusterPlace:
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


def _home(cluster: ClusterPlace) -> Home:
    roles = cluster.config.roles
    for role in Role:
        _check_alone(cluster, role)
    prefill, decode = _instance(cluster, Role.PREFILL), _instance(cluster, Role.DECODE)
    nodes = roles.prefill.count + roles.decode.count + roles.mixed.count
    if nodes < 2 and not cluster.name:
        raise ConfigError("roles: one node cannot be split; plan with at least 2")
    same = (roles.prefill.hardware, roles.prefill.gpus) == (roles.decode.hardware, roles.decode.gpus)
    attending = _attending(cluster) if roles.attention.count else None
    counted = [(role.count, role.price or cluster.price) for role in (roles.prefill, roles.decode, roles.mixed)]
    return Home(
        name=cluster.name,
        nodes=nodes,
        configured=roles.prefill.count,
        fixed=not same or attending is not None,
        mixed=roles.mixed.count > 0,
        price=sum([count * price for count, price in counted]) / nodes,
        prefill=prefill,
        decode=decode,
        attending=attending,
    )


def _attending(cluster: ClusterPlace) -> AttentionPool:
    """Its attention nodes, which serve those that only decode."""
    roles = cluster.config.roles
    if roles.mixed.count or not roles.decode.count:
        raise ConfigError(
            f"{_named(cluster)}roles.attention: is planned beside decode nodes; give it these, and no mixed nodes"
        )
    if not cluster.name and (roles.decode.price is None) != (roles.attention.price is None):
        without, other = ("decode", "attention") if roles.decode.price is None else ("attention", "decode")
        raise ConfigError(f"roles.{without}.price: {other} nodes have one; give these one too, or none to both")
    share, facts = roles.attention.count / roles.decode.count, _instance(cluster, Role.ATTENTION)
    price, decode_price = roles.attention.price or cluster.price, roles.decode.price or cluster.price
    alone = _alone(cluster, (decode_price + share * price) / decode_price)
    return AttentionPool(roles.attention.count, share, price, decode_price, facts, alone)


def _alone(cluster: ClusterPlace, times: float) -> tuple[tuple[int, NodeFacts], ...]:
    """What so many times the price of a decode node buys of its kind, to the nearest accelerator, grouped in any way in
    which the weights fit. A measured curve is of the nodes as they are."""
    config, decode = cluster.config, _instance(cluster, Role.DECODE)
    if not isinstance(decode.cost, Analytic):
        return ((max(1, round(times)), decode),)
    total = max(1, round(times * decode.cost.num_gpus))
    found = []
    for gpus in [each for each in range(1, total + 1) if total % each == 0]:
        nodes = config.roles.decode.model_copy(update={"gpus": gpus})
        roles = config.roles.model_copy(update={"decode": nodes})
        changed = msgspec.structs.replace(cluster, config=config.model_copy(update={"roles": roles}))
        if msgspec.structs.replace(decode.cost, num_gpus=gpus).fits:
            found.append((total // gpus, _instance(changed, Role.DECODE)))
    return tuple(found)


def _remote(config: Config, cluster: ClusterPlace, home: str) -> RemotePrefill:
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
    return RemotePrefill(cluster.name, count, cluster.price, instance, link.gbps * 1e9 / 8, link.rtt_ms / 1000)


def _check_alone(cluster: ClusterPlace, role: Role) -> None:
    if role_config(cluster.config, role).pipeline > 1:
        raise ConfigError(
            f"{_named(cluster)}roles.{role}.pipeline: the equations know nodes that work alone; plan with pipeline 1"
        )


def _instance(cluster: ClusterPlace, role: Role) -> NodeFacts:
    """One node of a role as it would be, also where the configuration has none yet."""
    config = cluster.config
    model = Path(config.model) if config.model else None
    cost = cost_of(config, role_config(config, role), model)
    return role_facts(cluster, role, cost, PLAIN_BLOCK_SIZE)


def _named(cluster: ClusterPlace) -> str:
    return f"clusters.{cluster.name}: " if cluster.name else ""
