"""What a deployment's nodes get from its configuration: the network of their sessions, and their limits."""

from __future__ import annotations

from isthmus.config import Config, RoleConfig
from isthmus.deploy import rates_of
from isthmus.errors import ConfigError
from isthmus.messenger import Share, TcpNetwork, Terms, Tls
from isthmus.types import Role


def network_of(config: Config, nodes: RoleConfig | None = None) -> TcpNetwork:
    """TCP as configured, for a node of a role or, without one, for the head. Raises ConfigError when only some of the
    TLS files are given, or one of them cannot be used."""
    files = config.tls
    given = (files.certificate, files.key, files.authority)
    tls = None
    if any(given):
        if not all(given):
            raise ConfigError("tls: certificate, key and authority are needed, all three or none")
        tls = Tls(*map(str, given))
    share = None
    if nodes is not None:
        share = Share(max(1, int(rates_of(config, nodes).network * config.network.background_share)))
    terms = Terms(resume_s=config.network.resume_s)
    return TcpNetwork(config.network.connections, tls, terms, share)


def sequences_of(config: Config) -> dict[Role, int]:
    """How many requests nodes of each role compute at once."""
    roles: dict[Role, RoleConfig] = {role: getattr(config.roles, role.value) for role in Role}
    return {role: nodes.max_sequences or config.engine.max_sequences for role, nodes in roles.items()}


def state_slots(config: Config, role: Role) -> int:
    """For how many requests a node must be able to hold live states: its role may change."""
    sequences = sequences_of(config)
    return sequences[role] if config.offload.convert == "none" else max(sequences.values())
