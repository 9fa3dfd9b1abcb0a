"""The clusters of a configuration, each with the configuration as it holds for its nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from isthmus.config import Config, RoleConfig, RolesConfig
from isthmus.deploy.costs import is_shipped
from isthmus.types import NodeId, Role


def role_config(config: Config, role: Role) -> RoleConfig:
    """Of the nodes of a role."""
    nodes: RoleConfig = getattr(config.roles, role.value)
    return nodes


def for_role(config: Config, role: Role) -> Config:
    """With `engine` as it holds for the nodes of a role."""
    nodes = role_config(config, role)
    own = {key: getattr(nodes, key) for key in ("hardware", "gpus", "max_sequences", "kv_memory")}
    given = {key: value for key, value in own.items() if value is not None}
    return config.model_copy(update={"engine": config.engine.model_copy(update=given)})


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
        roles = RolesConfig(**dict(cluster.roles))  # all are named, for who reads a dump of it
        update = {"engine": engine, "roles": roles, "clusters": {}, "links": ()}
        found.append(Cluster(name, config.model_copy(update=update), cluster.price))
    return found


def at_home(config: Config, folder: Path) -> Config:
    """The same with each `cost` that names a file, and a `model` that is one there, found from the folder of the
    configuration file."""

    def placed(section: Any) -> Any:
        if not isinstance(section.cost, str) or is_shipped(section.cost):
            return section
        return section.model_copy(update={"cost": str(folder / Path(section.cost).expanduser())})

    clusters = {name: placed(cluster) for name, cluster in config.clusters.items()}
    changed: dict[str, Any] = {"engine": placed(config.engine), "clusters": clusters}
    if config.model is not None and (folder / config.model).is_file():
        changed["model"] = str(folder / config.model)
    return config.model_copy(update=changed)


def rooted(config: Config, folder: Path) -> Config:
    """The same with files named from the root, for processes that run in another folder than `folder`."""

    def named(section: Any, *names: str) -> Any:
        given = {name: getattr(section, name) for name in names}
        found = {
            name: str(folder / Path(value).expanduser()) for name, value in given.items() if value is not None
        }
        return section.model_copy(update=found)

    def costed(section: Any) -> Any:
        return (
            named(section, "cost")
            if isinstance(section.cost, str) and not is_shipped(section.cost)
            else section
        )

    engine = costed(config.engine)
    if engine.kind == "vllm":
        python = engine.vllm.python or ""  # without a / it is one of the PATH
        engine = engine.model_copy(
            update={"vllm": named(engine.vllm, "logs", *["python"] * (os.sep in python))}
        )
    return named(config, "record").model_copy(
        update={
            "engine": engine,
            "clusters": {name: costed(cluster) for name, cluster in config.clusters.items()},
            "cache": named(config.cache, "folder"),
            "tls": named(config.tls, "folder", "certificate", "key", "authority"),
            "https": named(config.https, "certificate", "key"),
        }
    )
