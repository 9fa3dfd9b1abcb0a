"""Which nodes a configuration asks for, and whether they can serve anything."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.config import Config
from isthmus.deploy.clusters import Cluster, clusters_of, role_config
from isthmus.deploy.rules import links_of
from isthmus.errors import ConfigError
from isthmus.types import NodeId, Role


class Place(msgspec.Struct, frozen=True):
    """One node that is asked for, a pipeline group being one."""

    node: NodeId
    role: Role
    cluster: Cluster

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


def _counts(cluster: Cluster) -> dict[Role, int]:
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
