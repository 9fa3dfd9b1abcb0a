"""The network of a deployment's sessions."""

from __future__ import annotations

from isthmus.config import Config
from isthmus.deploy import Rates
from isthmus.errors import ConfigError
from isthmus.messenger import Share, TcpNetwork, Terms, Tls


def network_of(config: Config, rates: Rates | None = None) -> TcpNetwork:
    """TCP as configured, for a node with these links or, without them, for the head. Raises ConfigError when only some
    of the TLS files are given, or one of them cannot be used."""
    files = config.tls
    given = (files.certificate, files.key, files.authority)
    tls = None
    if any(given):
        if not all(given):
            raise ConfigError("tls: certificate, key and authority are needed, all three or none")
        tls = Tls(*map(str, given))
    share = None
    if rates is not None:
        share = Share(max(1, int(rates.network * config.network.background_share)))
    terms = Terms(resume_s=config.network.resume_s)
    return TcpNetwork(config.network.connections, tls, terms, share)
