"""Which nodes a configuration asks for, in which clusters and from which files; and, where it names none, which suit
the cores here.

The latter are rules of the number of cores alone, so that they are known before a model is read and cost no start any
time. What was measured for them: docs/decisions/0013-one-node-on-few-cores.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from isthmus.config import Config, RoleConfig, RolesConfig
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, Role
from isthmus.facts.facts import is_shipped
from isthmus.facts.rules import links_of

_Section = TypeVar("_Section", bound=BaseModel)

SPLIT_CORES = 8
"""From so many cores on, prefill and decode get a node each. On fewer, half of the cores is what is missed most: a
mixed node has all of them for whatever there is to do, computes prompts in the same iterations as decodes, and hands
nothing over."""
SPARE_CORES = 4
"""From so many cores on, one is kept for gateway and sessions. They take a small part of one: of two or three cores,
keeping one loses more than sharing it."""


def role_config(config: Config, role: Role) -> RoleConfig:
    """Of the nodes of a role."""
    nodes: RoleConfig = getattr(config.roles, role.value)
    return nodes


def for_role(config: Config, role: Role) -> Config:
    """With `engine` as it holds for the nodes of a role."""
    nodes = role_config(config, role)
    engine = _overridden(config.engine, nodes, "hardware", "gpus", "max_sequences", "kv_memory")
    return config.model_copy(update={"engine": engine})


def _overridden(section: _Section, own: BaseModel, *keys: str) -> _Section:
    """With those of these values that `own` gives."""
    return section.model_copy(update={key: value for key in keys if (value := getattr(own, key)) is not None})


class ClusterPlace(msgspec.Struct, frozen=True):
    """One cluster. `config`: the deployment's as it holds for the nodes here: `roles`, `engine.hardware`, `engine.gpus`
    and `engine.cost` are this cluster's. `name`: "" where the configuration names none."""

    name: str
    config: Config
    price: float = 1.0

    def node(self, role: Role, number: int) -> NodeId:
        return NodeId(f"{self.name}-{role}-{number}" if self.name else f"{role}-{number}")


def clusters_of(config: Config) -> list[ClusterPlace]:
    """In the order of the configuration, which is also that of their nodes."""
    if not config.clusters:
        return [ClusterPlace("", config)]
    found = []
    for name, cluster in config.clusters.items():
        engine = _overridden(config.engine, cluster, "hardware", "gpus", "cost")
        roles = RolesConfig(**dict(cluster.roles))  # all are named, for who reads a dump of it
        update = {"engine": engine, "roles": roles, "clusters": {}, "links": ()}
        found.append(ClusterPlace(name, config.model_copy(update=update), cluster.price))
    return found


class Place(msgspec.Struct, frozen=True):
    """One node that is asked for, a pipeline group being one."""

    node: NodeId
    role: Role
    cluster: ClusterPlace

    @property
    def stages(self) -> int:
        """Machines that work as this node."""
        return role_config(self.cluster.config, self.role).pipeline


def places_of(config: Config) -> list[Place]:
    """All nodes, by cluster and role. Raises ConfigError when they cannot serve anything, or make no whole groups."""
    clusters = clusters_of(config)
    counts = {cluster.name: _counts(cluster) for cluster in clusters}
    _check_served(counts, config)
    return [
        Place(cluster.node(role, number), role, cluster)
        for cluster in clusters
        for role, count in counts[cluster.name].items()
        for number in range(count)
    ]


def _counts(cluster: ClusterPlace) -> dict[Role, int]:
    """Nodes of each role."""
    where, counts = f"clusters.{cluster.name}.roles" if cluster.name else "roles", {}
    for role in Role:
        nodes = role_config(cluster.config, role)
        if nodes.pipeline > 1 and role is not Role.PREFILL:
            raise ConfigError(f"{where}.{role}.pipeline: only prefill nodes form pipeline groups")
        if nodes.pipeline > 1 and cluster.config.offload.convert != "none":
            raise ConfigError(
                f"{where}.{role}.pipeline: offload.convert turns no pipeline groups into other nodes"
            )
        if nodes.max_sequences is not None and role is Role.ATTENTION:
            raise ConfigError(
                f"{where}.{role}.max_sequences: attention nodes compute no requests; leave it out"
            )
        if nodes.count % nodes.pipeline:
            raise ConfigError(
                f"{where}.{role}: {nodes.count} nodes make no groups of {nodes.pipeline}; give a multiple of it"
            )
        counts[role] = nodes.count // nodes.pipeline
    return counts


def _check_served(counts: Mapping[str, Mapping[Role, int]], config: Config) -> None:
    """A cluster decodes what it or a linked one prefills; what prefills only must have somebody to decode."""
    if not any(roles[Role.MIXED] or roles[Role.DECODE] for roles in counts.values()) or not any(
        roles[Role.MIXED] or roles[Role.PREFILL] for roles in counts.values()
    ):
        raise ConfigError(
            f"{'clusters' if config.clusters else 'roles'}: no request could be served: give at least one mixed "
            "node, or a prefill and a decode node"
        )
    for name, roles in counts.items():
        if bool(roles[Role.PREFILL]) == bool(roles[Role.DECODE]):
            continue
        lonely, other = (Role.PREFILL, Role.DECODE) if roles[Role.PREFILL] else (Role.DECODE, Role.PREFILL)
        linked = [link.source for link in links_of(config) if link.target == name]
        # A mixed node decodes what comes over a link, and sends nothing over it.
        if any(counts[far][other] or (other is Role.DECODE and counts[far][Role.MIXED]) for far in linked):
            continue
        if not name:
            raise ConfigError(
                f"roles: {lonely} nodes need at least one node of the other kind; mixed nodes do not pair with them"
            )
        raise ConfigError(
            f"clusters.{name}: its {lonely} nodes need {other} nodes there or in a cluster that a link joins to it"
        )


def shaped(config: Config, cores: int) -> tuple[Config, str]:
    """The configuration with the nodes that suit so many cores, and why, in a sentence; as it is and "" where it names
    nodes, or where these cores are not what they compute with."""
    engine = config.engine
    if config.placement != "local" or config.clusters or "roles" in config.model_fields_set:
        return config, ""
    if engine.kind == "emulated" or engine.device not in (None, "cpu"):
        return config, ""
    if cores >= SPLIT_CORES:
        return config, f"{cores} cores are enough for a node of each phase; --mixed 1 makes it one for both."
    why = (
        f"One mixed node has all the cores ({cores}): of two, each would have half and idle by turns; "
        "--prefill 1 --decode 1 starts two."
    )
    roles = RolesConfig(mixed=RoleConfig())
    return config.model_copy(update={"roles": roles}), why


def node_threads(cores: int, num_processes: int) -> int:
    """Of each of so many processes: the cores shared evenly, since a parallel kernel waits for its slowest thread and a
    core lent twice costs more than it gives."""
    shared = cores if cores < SPARE_CORES else cores - 1
    return max(1, shared // num_processes)


def at_home(config: Config, folder: Path) -> Config:
    """The same with each `cost` that names a file, and a `model` that is one there, found from the folder of the
    configuration file."""
    clusters = {name: _costed(cluster, folder) for name, cluster in config.clusters.items()}
    changed: dict[str, Any] = {"engine": _costed(config.engine, folder), "clusters": clusters}
    if config.model is not None and (folder / config.model).is_file():
        changed["model"] = str(folder / config.model)
    return config.model_copy(update=changed)


def rooted(config: Config, folder: Path) -> Config:
    """The same with files named from the root, for processes that run in another folder than `folder`."""
    engine = _costed(config.engine, folder)
    if engine.kind == "vllm":
        is_path = os.sep in (engine.vllm.python or "")  # else it is one of the PATH
        vllm = _found(engine.vllm, folder, "logs", *["python"] * is_path)
        engine = engine.model_copy(update={"vllm": vllm})
    return _found(config, folder, "record").model_copy(
        update={
            "engine": engine,
            "clusters": {name: _costed(cluster, folder) for name, cluster in config.clusters.items()},
            "cache": _found(config.cache, folder, "folder"),
            "tls": _found(config.tls, folder, "folder", "certificate", "key", "authority"),
            "https": _found(config.https, folder, "certificate", "key"),
        }
    )


def _found(section: _Section, folder: Path, *keys: str) -> _Section:
    """The same with these files, where they are given, found from a folder."""
    given = {key: value for key in keys if (value := getattr(section, key)) is not None}
    found = {key: str(folder / Path(value).expanduser()) for key, value in given.items()}
    return section.model_copy(update=found)


def _costed(section: _Section, folder: Path) -> _Section:
    cost = getattr(section, "cost")  # noqa: B009
    return _found(section, folder, "cost") if isinstance(cost, str) and not is_shipped(cost) else section
