"""A node's own links."""

from __future__ import annotations

import msgspec

from isthmus.config import Config, RoleConfig
from isthmus.cost import Handling, hardware_named
from isthmus.deploy.costs import gpus_of, hardware_of

UNLIMITED = 1 << 50
"""Bytes per second of a link that nobody asked to limit."""


class Rates(msgspec.Struct, frozen=True):
    """One node's links in bytes per second. `handover`: its own rail for prefill to decode, 0 shares `network`.

    `rtt_ns`: of a question to another node of its cluster and the answer, what does not depend on their size.
    """

    network: int = UNLIMITED
    handover: int = 0
    memory: int = UNLIMITED
    disk_read: int = UNLIMITED
    disk_write: int = UNLIMITED
    rtt_ns: int = 66_600


def rates_of(config: Config, nodes: RoleConfig, handling: Handling) -> Rates:
    """A group's links add up, as each of its machines moves its own layers. A link is no faster than the core that all
    KV on it passes through."""
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    gpus, network = gpus_of(config, nodes), config.network
    rail, memory, copy_s = network.handover_gbps, int(hardware.pcie_bw * gpus), handling.load_byte_s
    return Rates(
        network=handling.narrowed(bytes_per_s(network.node_gbps, int(hardware.nic_bw * gpus))) * nodes.pipeline,
        handover=handling.narrowed(bytes_per_s(rail, 0)) * nodes.pipeline,
        memory=(min(memory, round(1 / copy_s)) if copy_s else memory) * nodes.pipeline,
        disk_read=int(hardware.ssd_read_bw) * nodes.pipeline,
        disk_write=int(hardware.ssd_write_bw) * nodes.pipeline,
        rtt_ns=round(1000 * network.rtt_us),
    )


def bytes_per_s(gbps: float | None, otherwise: int) -> int:
    return otherwise if gbps is None else int(gbps * 1e9 / 8)
