"""`isthmus status`: a running cluster, as tables or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import typer

from isthmus.cli.asking import ask, checked_url
from isthmus.live.gateway.status import NodeStatus, OffloadStatus, RouterStatus, ServerStatus, Status
from isthmus.sheet import Column, Sheet, Source, texts

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def status_sheets(status: Status | RouterStatus, url: str) -> list[Sheet]:
    """Servers of a router; or of a cluster its nodes, their cache tiers, if there are any, KV between nodes, if there
    are several, links between clusters, how engines multiply, and what to know of them."""
    if isinstance(status, RouterStatus):
        return [_servers(status, url)]
    sheets = [_nodes(status, url)]
    if any(node.cache for node in status.nodes):
        sheets.append(_tiers(status.nodes))
    if len(status.nodes) > 1:
        sheets.append(_transfers(status.nodes))
    if status.offload is not None:
        sheets.append(_links(status.offload))
    if any(node.products for node in status.nodes):
        sheets.append(_products(status.nodes))
    if any(node.remark for node in status.nodes):
        sheets.append(_remarks(status.nodes))
    return sheets


def _servers(status: RouterStatus, url: str) -> Sheet:
    columns: list[tuple[Column, Source]] = [
        (Column("server", left=True), "server"),
        (Column("state", left=True), _server_state),
        (Column("kind, told", left=True), lambda server: f"{server.kind} {server.version}".strip() or None),
        (Column("role", left=True), "role"),
        (Column("models", left=True), lambda server: ", ".join(server.models) or None),
        (Column("longest, told"), lambda server: server.longest or None),
        (Column("KV tokens, told"), lambda server: server.kv_tokens or None),
        (Column("running"), "requests_running"),
        (Column("requests"), "requests_total"),
        (Column("failures"), "failures_total"),
        (Column("continued"), "continued_total"),
        (
            Column("cached %, told", form=".1f"),
            lambda server: _percent(
                server.cached_tokens_total / server.cache_told_tokens_total
                if server.cache_told_tokens_total
                else None
            ),
        ),
        (Column("cache blocks, believed"), "cache_blocks"),
        (Column("of"), "cache_capacity_blocks"),
        (Column("which is", left=True), lambda server: server.cache_from or None),
    ]
    num_up = sum([server.up and not server.draining for server in status.servers])
    return Sheet.of(f"Router at {url}: {num_up} of {len(status.servers)} servers", columns, status.servers)


def _server_state(server: ServerStatus) -> str:
    if server.draining:
        return "draining"
    return "DOWN" if not server.up else "slow" if server.slow else "up"


def _headline(status: Status, url: str) -> str:
    parts = [
        "ready" if status.healthy else "NOT READY: no prefill and decode node, nor a mixed one",
        f"{status.requests_running:,} requests running",
        f"prefix hit rate {100 * status.hit_rate:.1f} %"
        if status.hit_rate is not None
        else "no prefix looked up",
    ]
    refused = [f"{stage} {count:,}" for stage, count in status.requests_refused.items() if count]
    if refused:
        parts.append(f"refused: {', '.join(refused)}")
    return f"{status.model} at {url}: {', '.join(parts)}"


def _nodes(status: Status, url: str) -> Sheet:
    columns: list[tuple[Column, Source]] = [
        (Column("node", left=True), "node"),
        (Column("role", left=True), "role"),
        (Column("running"), "requests_running"),
        (Column("waiting"), "requests_waiting"),
        (Column("preempted"), "preemptions"),
        (Column("KV memory"), lambda node: _size(node.kv_memory.capacity_bytes)),
        (
            Column("used %", form=".1f"),
            lambda node: _percent(node.kv_memory.used_bytes / node.kv_memory.capacity_bytes),
        ),
        (Column("hits %", form=".1f"), lambda node: _percent(node.prefix_cache.hit_rate)),
        (Column("evicted"), lambda node: node.prefix_cache.evicted_blocks),
        (Column("state", left=True), _state),
    ]
    return Sheet.of(_headline(status, url), columns, status.nodes)


def _tiers(nodes: Iterable[NodeStatus]) -> Sheet:
    columns: list[tuple[Column, Source]] = [
        (Column("node", left=True), lambda row: row[0]),
        (Column("tier", left=True), lambda row: row[2].tier),
        (Column("used"), lambda row: _size(row[2].used_bytes)),
        (Column("of"), lambda row: _size(row[2].capacity_bytes)),
        (
            Column("full %", form=".1f"),
            lambda row: _percent(row[2].used_bytes / row[2].capacity_bytes if row[2].capacity_bytes else None),
        ),
        (Column("blocks"), lambda row: row[2].blocks),
        (Column("hits %", form=".1f"), lambda row: _percent(row[2].hit_rate)),
        (Column("evicted"), lambda row: row[2].evictions),
        (Column("pinned"), lambda row: row[1].pinned_blocks if row[2].tier == "memory" else None),
        (Column("in"), lambda row: _size(row[2].bytes_in)),
        (Column("out"), lambda row: _size(row[2].bytes_out)),
    ]
    rows = [(node.node, node.cache, tier) for node in nodes if node.cache for tier in node.cache.tiers]
    return Sheet.of("Cache tiers (hits: of all prompt tokens of the cluster)", columns, rows)


def _transfers(nodes: Iterable[NodeStatus]) -> Sheet:
    columns: list[tuple[Column, Source]] = [
        (Column("node", left=True), "node"),
        (Column("handed over, in"), lambda node: _size(node.transfers.handover_bytes_in)),
        (Column("out"), lambda node: _size(node.transfers.handover_bytes_out)),
        (Column("fetched"), lambda node: _size(node.transfers.fetched_bytes)),
        (Column("borrowed"), lambda node: _size(node.transfers.borrowed_bytes)),
        (Column("given"), lambda node: _size(node.transfers.given_bytes)),
        (Column("damaged"), lambda node: node.transfers.seal_mismatches),
    ]
    return Sheet.of("KV between nodes", columns, nodes)


def _links(offload: OffloadStatus) -> Sheet:
    threshold = (
        "nothing is prefilled in another cluster"
        if offload.threshold is None
        else f"prefilled in another cluster: more than {offload.threshold:,} uncached tokens"
    )
    reason = f" ({offload.reason})" if offload.reason else ""
    counts = f"{offload.requests:,} requests so far, threshold set {offload.changes:,} times"
    if offload.conversions:
        counts += f", {offload.conversions:,} nodes converted"
    columns: list[tuple[Column, Source]] = [
        (Column("from", left=True), "source"),
        (Column("to", left=True), "target"),
        (Column("state", left=True), lambda link: "up" if link.up else "DOWN"),
        (Column("Gbit/s", form=".2f"), "gbps"),
        (Column("of", form="g"), "rated_gbps"),
        (Column("sent"), lambda link: _size(link.sent_bytes)),
        (Column("queued"), lambda link: _size(link.queued_bytes)),
        (Column("round trip ms", form=".1f"), "rtt_ms"),
    ]
    return Sheet.of(f"Links; {threshold}{reason}; {counts}", columns, offload.links)


def _products(nodes: Iterable[NodeStatus]) -> Sheet:
    """A row for each shape, as long as the nodes chose alike: they mostly run on machines of one kind."""
    rows = []
    multiplying = [node for node in nodes if node.products]
    for line in sorted({line for node in multiplying for line in node.products}):
        own = [node.node for node in multiplying if line in node.products]
        shape, _, chosen = line.partition(": ")
        rows.append((shape, "all" if len(own) == len(multiplying) else ", ".join(own), chosen))
    columns = texts("weights", "nodes", "product, by the rows that it multiplies")
    return Sheet("Products, the fastest as timed", columns, rows)


def _remarks(nodes: Sequence[NodeStatus]) -> Sheet:
    """A row for each remark."""
    rows = []
    for remark in sorted({node.remark for node in nodes if node.remark}):
        own = [node.node for node in nodes if node.remark == remark]
        rows.append(("all" if len(own) == len(nodes) else ", ".join(own), remark))
    return Sheet("Remarks", texts("nodes", "remark"), rows)


def _state(node: NodeStatus) -> str:
    """Problems of a node's cache, worst first."""
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


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _size(num_bytes: int) -> str:
    """Three digits or so, in binary units as in the configuration: 1.5 GiB."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if num_bytes else "0"


ANSWER_S = 5.0


def status(
    url: Annotated[str, typer.Option(help="Where the cluster serves HTTP.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, no table.")] = False,
    watch: Annotated[float | None, typer.Option(min=0.1, help="Again every so many seconds.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key; default: ISTHMUS_API_KEY.")] = None,
) -> None:
    """Show a running cluster: nodes, requests, KV memory, cache tiers, hit rates and KV between nodes."""
    from isthmus.cli.outputs import show
    from isthmus.config import api_key as key_of

    base = checked_url("--url", url)
    key = key_of("--api-key", api_key)
    if as_json:
        for answer in _answers(base, key, watch):
            _read(answer, base)
            print(answer.decode().strip(), flush=True)
    elif watch is not None and sys.stdout.isatty():
        _live(base, key, watch)
    else:
        for answer in _answers(base, key, watch):
            show(*status_sheets(_read(answer, base), base))
            sys.stdout.flush()


def _answers(base: str, key: str | None, every_s: float | None) -> Iterator[bytes]:
    """Prints one answer, or one every `watch` seconds until Ctrl-C."""
    yield _ask(base, key)
    try:
        while every_s is not None:
            time.sleep(every_s)
            yield _ask(base, key)
    except KeyboardInterrupt:
        return


def _live(base: str, key: str | None, every_s: float) -> None:
    """A screen of its own. A cluster that goes away, say to be restarted, is waited for."""
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from isthmus.core.errors import UnavailableError

    def now() -> RenderableType:
        sheets = status_sheets(_read(_ask(base, key), base), base)
        return Group(*(sheet.terminal() for sheet in sheets))

    shown = now()
    try:
        with Live(shown, console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                try:
                    shown = now()
                except UnavailableError as error:
                    shown = Text(str(error))
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return


def _ask(base: str, key: str | None) -> bytes:
    """The body of GET /status. Raises UnavailableError."""
    return ask(base, "/status", key, answer_s=ANSWER_S, who=_WHOSE, keyed=_KEYED)


def _read(answer: bytes, base: str) -> Status | RouterStatus:
    """Raises UnavailableError when something else than this version's gateway answered."""
    import msgspec

    from isthmus.core.errors import UnavailableError

    try:
        if answer.startswith(b'{"servers":'):
            return msgspec.json.decode(answer, type=RouterStatus)
        return msgspec.json.decode(answer, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"{base}/status is not what this version reads: {error}; {_WHOSE}") from None


_WHOSE = "is `isthmus serve` or `route` running there? (--url)"
_KEYED = "the server's key is needed: set ISTHMUS_API_KEY (or --api-key)"
