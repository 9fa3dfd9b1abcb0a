"""How many clients may be connected at once, so that descriptors are left for nodes, files and pipes."""

from __future__ import annotations

import resource

from isthmus.core.errors import StartError

MOST_DESCRIPTORS = 65_536
RESERVED = 256
"""Descriptors for all but clients: files, pipes of nodes that start, connections on their way in or out."""
RESERVED_BY_NODE = 8
MOST_CONNECTIONS = 16_384


def raise_descriptors() -> int:
    """Raises this process's descriptor limit as far as it may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connections_within(descriptors: int, num_nodes: int, asked: int | None) -> int:
    """Connections of clients beside so many nodes. Raises StartError where those `asked` for do not fit."""
    reserved = RESERVED + RESERVED_BY_NODE * num_nodes
    fit = descriptors - reserved
    if fit < (asked or 16):
        raise StartError(
            f"{asked or 16} connections (limits.connections) do not fit in {descriptors} descriptors, of which "
            f"{reserved} are kept for {num_nodes} nodes and files; raise the limit (ulimit -n)"
        )
    return asked or min(fit, MOST_CONNECTIONS)
