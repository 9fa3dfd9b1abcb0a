"""`isthmus status`: what it shows of a real cluster, and one line for each way it can go wrong."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from isthmus.cli import status
from isthmus.cli.status import status_sheets
from isthmus.core.types import Role
from isthmus.live.gateway.node_metrics import NODE_METRICS
from isthmus.live.gateway.status import (
    CacheStatus,
    LinkStatus,
    MemoryStatus,
    NodeStatus,
    OffloadStatus,
    ReuseStatus,
    RouterStatus,
    ServerStatus,
    Status,
    TierStatus,
    TransferStatus,
)
from tests.cli.conftest import Command
from tests.inside import inside
from tests.models import make_model

CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.001}
MEMORY = TierStatus("memory", 1 << 30, 1 << 29, 1234, 50, 0.4, 6, 3 << 20, 7 << 20)
DISK = TierStatus("disk", 1 << 40, 0, 0, 0, 0.0, 0, 0, 0)
CACHE = CacheStatus((MEMORY, DISK), 3, 2, False, 0, 0, 0, 0)
NODE = NodeStatus(
    *("prefill-0", Role.PREFILL, 2, 1, 0),
    kv_memory=MemoryStatus(1 << 30, 1 << 28, 0),
    prefix_cache=ReuseStatus(2000, 1200, 0.6, 9),
    transfers=TransferStatus(0, 5 << 20, 6 << 20, 7 << 20, 0, 4),
    cache=CACHE,
)
STATUS = Status(0.0, "acme/tiny", True, 2, {}, 0.6, (NODE,))


def replace(**fields: object) -> Status:
    return msgspec.structs.replace(STATUS, **fields)


@contextmanager
def answering(*bodies: bytes | int, seen: list[tuple[str, str | None]] | None = None) -> Iterator[str]:
    """The URL of a server that answers GET /status with these in turn, the last one again and again. An int is a
    status: a redirection to another host name, or a failure. `seen`: paths and keys that it is asked for."""
    left = list(bodies)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if seen is not None:
                seen.append((self.path, self.headers["Authorization"]))
            body = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(body, int) and body != 302:
                self.send_error(body)
                return
            self.send_response(302 if body == 302 else 200)
            if isinstance(body, int):
                self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")
            self.end_headers()
            if isinstance(body, bytes):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table in Markdown."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]


def naps(count: int) -> Callable[[float], None]:
    """A `sleep` that takes no time, and the last of so many is interrupted as by Ctrl-C."""
    left = [count]

    def sleep(_: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return sleep


def test_the_tables(isthmus: Command) -> None:
    with answering(msgspec.json.encode(STATUS)) as url:
        code, out, err = isthmus("status", "--url", url + "/")
    assert (code, err) == (0, "")
    assert f"acme/tiny at {url}: ready, 2 requests running, prefix hit rate 60.0 %" in out
    rows = rows_of(out)
    assert ["prefill-0", "prefill", "2", "1", "0", "1 GiB", "25.0", "60.0", "9", "ok, 2 to write"] in rows
    memory = ["512 MiB", "1 GiB", "50.0", "1,234", "40.0", "6", "3", "3 MiB", "7 MiB"]
    assert ["prefill-0", "memory", *memory] in rows
    assert ["prefill-0", "disk", "0", "1 TiB", "0.0", "0", "0.0", "0", "–", "0", "0"] in rows
    assert "KV between nodes" not in out, "there is one node"


def test_what_moved_between_nodes() -> None:
    other = msgspec.structs.replace(NODE, node="decode-0", role=Role.DECODE, cache=None)
    assert other.transfers.seal_mismatches == 4
    moved = text_of(replace(nodes=(NODE, other)))[2]
    assert rows_of(moved)[-1] == ["decode-0", "0", "5 MiB", "6 MiB", "7 MiB", "0", "4"]


def test_links_between_clusters() -> None:
    link = LinkStatus("west", "east", False, 3 << 20, 0.25, 1.0, 0, None)
    offload = OffloadStatus(19400, "fixed", 3, 1200, 1, (link,))
    table = text_of(replace(offload=offload))[-1]
    said = " ".join(table.split())
    assert "Links; prefilled in another cluster: more than 19,400 uncached tokens (fixed)" in said
    assert "1,200 requests so far, threshold set 3 times, 1 nodes converted" in said
    assert rows_of(table)[-1] == ["west", "east", "DOWN", "0.25", "1", "3 MiB", "0", "–"]
    none = text_of(replace(offload=msgspec.structs.replace(offload, threshold=None)))[-1]
    assert "nothing is prefilled in another cluster" in " ".join(none.split())


def test_products_are_a_row_for_all_nodes_that_chose_alike() -> None:
    wide, narrow = "96x64 float32: native", "64x64 float32: {} to 4, torch float32 beyond"
    own = [(narrow.format("native"), wide), (narrow.format("torch float32"), wide), ()]
    nodes = [msgspec.structs.replace(NODE, node=f"n-{at}", products=lines) for at, lines in enumerate(own)]
    assert rows_of(text_of(replace(nodes=nodes))[-1])[-3:] == [
        ["64x64 float32", "n-0", "native to 4, torch float32 beyond"],
        ["64x64 float32", "n-1", "torch float32 to 4, torch float32 beyond"],
        ["96x64 float32", "all", "native"],
    ]


def test_servers_of_a_router() -> None:
    one = ServerStatus("http://a:1", True, *[0] * 9, models=("m",))
    servers = (
        one,
        msgspec.structs.replace(one, server="http://b:1", draining=True),
        msgspec.structs.replace(one, server="http://c:1", up=False),
        msgspec.structs.replace(one, server="http://d:1", slow=True),
    )
    (shown,) = [sheet.markdown() for sheet in status_sheets(RouterStatus(servers), "http://here")]
    assert "Router at http://here: 2 of 4 servers" in shown
    states = re.findall(r"^\| http://(\w):1 +\| (\w+)", shown, re.M)
    assert states == [("a", "up"), ("b", "draining"), ("c", "DOWN"), ("d", "slow")]


def test_what_an_operator_should_see() -> None:
    troubled = msgspec.structs.replace(CACHE, degraded=True, io_errors=3, seal_mismatches=1200)
    nodes = (msgspec.structs.replace(NODE, cache=troubled),)
    table = text_of(
        replace(healthy=False, hit_rate=None, requests_refused={"decode": 7, "prefill": 0}, nodes=nodes)
    )
    assert "SSD takes nothing, 3 I/O errors, 1,200 damaged on SSD" in table[0]
    headline = " ".join(table[0].split())
    assert "NOT READY" in headline and "no prefix looked up, refused: decode 7 |" in headline + " |"
    assert "–" in text_of(replace(nodes=(nodes[0],), hit_rate=None))[1], "pins are of memory"


def text_of(status: Status) -> list[str]:
    """Each table as Markdown."""
    return [sheet.markdown() for sheet in status_sheets(status, "http://here")]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_again_and_again_until_interrupted(
    isthmus: Command, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    monkeypatch.setattr(time, "sleep", naps(3))
    with answering(msgspec.json.encode(STATUS)) as url:
        code, out, err = isthmus("status", "--url", url, "--watch", 2, *form)
    assert (code, err) == (0, "")
    assert out.count("acme/tiny") == 3
    if form:  # what the gateway said, a line each time
        assert [msgspec.json.decode(line, type=Status) for line in out.splitlines()] == [STATUS] * 3


def test_a_watched_cluster_may_be_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "sleep", naps(3))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any output for a terminal then
    body = msgspec.json.encode(STATUS)
    with answering(body, 503, body) as url:
        status._live(url, None, 1.0)
    shown = capsys.readouterr().out
    assert shown.count("acme/tiny") == 2 and "503" in shown


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://here", "http://", "http://here:port", "http://[::1"])
def test_urls_that_are_none(isthmus: Command, url: str) -> None:
    code, out, err = isthmus("status", "--url", url)
    assert (code, out) == (2, "")
    assert err == f"isthmus: error: --url {url}: not a URL such as http://127.0.0.1:8000\n"


def test_nothing_is_there(isthmus: Command) -> None:
    with socket.socket() as bound:  # taken, and nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        code, out, err = isthmus("status", "--url", url)
    assert (code, out) == (1, "")
    assert err == (
        f"isthmus: error: nothing answers at {url}: Connection refused; "
        "is `isthmus serve` or `route` running there? (--url)\n"
    )


def test_it_does_not_answer_in_time(isthmus: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = isthmus("status", "--url", url)
    assert code == 1 and f"nothing answers at {url}: no answer within 0.05 s" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "says"), [(404, "answers 404 Not Found"), (b"<html>", "not what this version reads")]
)
def test_something_else_is_there(isthmus: Command, body: bytes | int, says: str) -> None:
    for form in ((), ("--json",)):
        with answering(body) as url:
            code, out, err = isthmus("status", "--url", url, *form)
        assert (code, out) == (1, "") and f"{url}/status" in err and says in err and err.count("\n") == 1


def test_of_a_running_cluster(isthmus: Command, tmp_path: Path) -> None:
    """Every figure that is read is reported by real nodes, and every metric of theirs is explained."""
    cache = {"dram": "1MiB", "ssd": "1MiB", "folder": str(tmp_path / "blocks")}
    engine = {"kind": "emulated", "cost": CURVE}
    with inside({"engine": engine, "cache": cache, "roles": {"prefill": 1, "decode": 1}}) as served:
        for _ in range(2):
            served.complete(list(range(200)), 4)
        served.wait_until(lambda: served.gauge("prefix_cache_hits_total")["prefill-0"] == 192, "it is told")
        names = set(re.findall(r"^isthmus_(\w+)\{node=", served.http.get("/metrics").text, re.M))
        others = ("pipeline_", "vllm_", "tls_", "tenant_")
        assert names == {name for name in NODE_METRICS if not name.startswith(others)}
        _, text, _ = isthmus("status", "--url", served.url)
        _, out, _ = isthmus("status", "--url", served.url, "--json")
    found = msgspec.json.decode(out, type=Status)
    prefill, decode = found.nodes
    assert (prefill.node, prefill.role, decode.node) == ("prefill-0", "prefill", "decode-0")
    assert found.hit_rate == prefill.prefix_cache.hit_rate == 192 / 400
    assert prefill.cache is not None and [tier.tier for tier in prefill.cache.tiers] == ["memory", "disk"]
    assert prefill.cache.tiers[0].blocks == 12 and prefill.cache.tiers[0].hits >= 12
    assert prefill.transfers.handover_bytes_out > 0 and prefill.kv_memory.capacity_bytes <= 64 << 20
    assert len(rows_of(text)) == (2 + 2) + (2 + 4) + (2 + 2)


def test_products_of_a_running_cluster(isthmus: Command, tmp_path: Path) -> None:
    """Each shape that was timed, as every node chose."""
    make_model(tmp_path / "wide", "llama", hidden_size=512, num_hidden_layers=1, initializer_range=0.02)
    settings = {
        "model": str(tmp_path / "wide"),
        "engine": {"dtype": "float32"},
        "roles": {"prefill": 1, "decode": 1},
    }
    with inside(settings) as served:
        served.wait_until(lambda: len(served.gauge("kv_blocks")) == 2, "both have reported")
        _, text, _ = isthmus("status", "--url", served.url)
        _, out, _ = isthmus("status", "--url", served.url, "--json")
    nodes = msgspec.json.decode(out, type=Status).nodes
    shapes = [[line.partition(": ")[0] for line in node.products] for node in nodes]
    assert shapes == 2 * [["1024x512 float32", "512x512 float32"]]
    rows = [row for row in rows_of(text) if row[0] in shapes[0]]
    assert {line for node in nodes for line in node.products} == {f"{row[0]}: {row[2]}" for row in rows}


def test_a_key_does_not_follow_to_another_server(isthmus: Command) -> None:
    seen: list[tuple[str, str | None]] = []
    with answering(302, msgspec.json.encode(STATUS), seen=seen) as url:
        code, _, err = isthmus("status", "--url", url, "--api-key", "sk-own")
    assert (code, err) == (0, "") and seen == [("/status", "Bearer sk-own"), ("/elsewhere", None)]


def test_a_server_that_wants_a_key(isthmus: Command) -> None:
    with answering(401) as url:
        code, out, err = isthmus("status", "--url", url, "--api-key", "sk-wrong")
    assert (code, out) == (1, "") and "401" in err and "ISTHMUS_API_KEY" in err and "sk-wrong" not in err
    code, out, err = isthmus("status", "--api-key", "sk wrong")
    assert (
        (code, out) == (2, "") and err.startswith("isthmus: error: --api-key: a key is") and "wrong" not in err
    )
