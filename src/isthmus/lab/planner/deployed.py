"""A plan as a configuration: what the simulator runs, and what an operator would write."""

from __future__ import annotations

from isthmus.config import NO_NODES, ClusterConfig, Config, RoleConfig, RolesConfig
from isthmus.facts import clusters_of
from isthmus.lab.planner.answer import DeploymentPlan

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
