"""A cluster's status on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from isthmus.live.gateway.status import CacheStatus, NodeStatus, OffloadStatus, Status, TierStatus

_NONE = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def status_tables(status: Status, url: str) -> list[Table]:
    """Nodes; their cache tiers, if there are any; KV between nodes, if there are several; links between clusters; how
    engines multiply, and what to know of them."""
    tables = [_nodes(status, url)]
    if any(node.cache for node in status.nodes):
        tables.append(_tiers(status.nodes))
    if len(status.nodes) > 1:
        tables.append(_transfers(status.nodes))
    if status.offload is not None:
        tables.append(_links(status.offload))
    if any(node.products for node in status.nodes):
        tables.append(_products(status.nodes))
    if any(node.remark for node in status.nodes):
        tables.append(_remarks(status.nodes))
    return tables


def _headline(status: Status, url: str) -> str:
    parts = [
        "ready" if status.healthy else "NOT READY: no prefill and decode node, nor a mixed one",
        f"{status.requests_running:,} requests running",
        f"prefix hit rate {_percent(status.hit_rate)} %"
        if status.hit_rate is not None
        else "no prefix looked up",
    ]
    refused = [f"{stage} {count:,}" for stage, count in status.requests_refused.items() if count]
    if refused:
        parts.append(f"refused: {', '.join(refused)}")
    return f"{status.model} at {url}: {', '.join(parts)}"


def _nodes(status: Status, url: str) -> Table:
    head = (
        *("node", "role", "running", "waiting", "preempted"),
        *("KV memory", "used %", "hits %", "evicted", "state"),
    )
    table = _table(_headline(status, url), head, text=("node", "role", "state"))
    for node in status.nodes:
        memory = node.kv_memory
        table.add_row(
            node.node,
            node.role,
            f"{node.requests_running:,}",
            f"{node.requests_waiting:,}",
            f"{node.preemptions:,}",
            _size(memory.capacity_bytes),
            _percent(memory.used_bytes / memory.capacity_bytes),
            _percent(node.prefix_cache.hit_rate),
            f"{node.prefix_cache.evicted_blocks:,}",
            _state(node),
        )
    return table


def _tiers(nodes: Iterable[NodeStatus]) -> Table:
    head = (
        *("node", "tier", "used", "of", "full %", "blocks", "hits %"),
        *("evicted", "pinned", "in", "out"),
    )
    table = _table("Cache tiers (hits: of all prompt tokens of the cluster)", head, text=("node", "tier"))
    for node in nodes:
        for tier in node.cache.tiers if node.cache else ():
            assert node.cache is not None
            table.add_row(node.node, *_tier(tier, node.cache))
    return table


def _tier(tier: TierStatus, cache: CacheStatus) -> tuple[str, ...]:
    return (
        tier.tier,
        _size(tier.used_bytes),
        _size(tier.capacity_bytes),
        _percent(tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else None),
        f"{tier.blocks:,}",
        _percent(tier.hit_rate),
        f"{tier.evictions:,}",
        f"{cache.pinned_blocks:,}" if tier.tier == "memory" else _NONE,
        _size(tier.bytes_in),
        _size(tier.bytes_out),
    )


def _transfers(nodes: Iterable[NodeStatus]) -> Table:
    head = ("node", "handed over, in", "out", "fetched", "borrowed", "given", "damaged")
    table = _table("KV between nodes", head, text=("node",))
    for node in nodes:
        moved = node.transfers
        sizes = (
            *(moved.handover_bytes_in, moved.handover_bytes_out),
            *(moved.fetched_bytes, moved.borrowed_bytes, moved.given_bytes),
        )
        table.add_row(node.node, *map(_size, sizes), f"{moved.seal_mismatches:,}")
    return table


def _links(offload: OffloadStatus) -> Table:
    threshold = (
        "nothing is prefilled in another cluster"
        if offload.threshold is None
        else f"prefilled in another cluster: more than {offload.threshold:,} uncached tokens"
    )
    reason = f" ({offload.reason})" if offload.reason else ""
    counts = f"{offload.requests:,} requests so far, threshold set {offload.changes:,} times"
    if offload.conversions:
        counts += f", {offload.conversions:,} nodes converted"
    head = ("from", "to", "state", "Gbit/s", "of", "sent", "queued", "round trip ms")
    table = _table(f"Links; {threshold}{reason}; {counts}", head, text=("from", "to", "state"))
    for link in offload.links:
        table.add_row(
            *(link.source, link.target, "up" if link.up else "DOWN"),
            *(f"{link.gbps:.2f}", f"{link.rated_gbps:g}", _size(link.sent_bytes), _size(link.queued_bytes)),
            _NONE if link.rtt_ms is None else f"{link.rtt_ms:.1f}",
        )
    return table


def _products(nodes: Iterable[NodeStatus]) -> Table:
    """A row for each shape, as long as the nodes chose alike: they mostly run on machines of one kind."""
    head = ("weights", "nodes", "product, by the rows that it multiplies")
    table = _table("Products, the fastest as timed", head, text=head)
    multiplying = [node for node in nodes if node.products]
    for line in sorted({line for node in multiplying for line in node.products}):
        own = [node.node for node in multiplying if line in node.products]
        shape, _, chosen = line.partition(": ")
        table.add_row(shape, "all" if len(own) == len(multiplying) else ", ".join(own), chosen)
    return table


def _remarks(nodes: Sequence[NodeStatus]) -> Table:
    """A row for each remark."""
    table = _table("Remarks", ("nodes", "remark"), text=("nodes", "remark"))
    for remark in sorted({node.remark for node in nodes if node.remark}):
        own = [node.node for node in nodes if node.remark == remark]
        table.add_row("all" if len(own) == len(nodes) else ", ".join(own), remark)
    return table


def _state(node: NodeStatus) -> str:
    """What an operator should look at, worst first."""
    cache = node.cache
    if cache is None:
        return "ok"
    found = ["SSD takes nothing"] if cache.degraded else []
    counts = {
        "I/O errors": cache.io_errors,
        "damaged on SSD": cache.seal_mismatches,
        "lost": cache.lost_blocks,
        "gone": cache.misses,
    }
    found += [f"{count:,} {what}" for what, count in counts.items() if count]
    return ", ".join(found) or (
        f"ok, {cache.write_queue_blocks:,} to write" if cache.write_queue_blocks else "ok"
    )


def _table(title: str, head: Iterable[str], text: Iterable[str]) -> Table:
    """Columns named in `text` are text, the others numbers."""
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in head:
        table.add_column(name, justify="left" if name in text else "right")
    return table


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _size(num_bytes: int) -> str:
    """Three digits or so, in binary units as in the configuration: 1.5 GiB."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if num_bytes else "0"
