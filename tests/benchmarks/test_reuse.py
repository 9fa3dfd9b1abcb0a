"""Rows are medians of pairs, and counters are those of the prefill nodes."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import reuse
from benchmarks.reuse import Answer, Client, row_of
from isthmus.bench import BenchError
from isthmus.bench.serve import Server


def test_a_row_is_made_of_medians() -> None:
    pairs = [
        (Answer(1.0, 0.9, 0.0, 0), Answer(0.10, 0.08, 0.03, 64)),
        (Answer(2.0, 1.9, 0.0, 0), Answer(0.50, 0.40, 0.10, 48)),
        (Answer(3.0, 2.9, 0.0, 0), Answer(0.20, 0.10, 0.02, 64)),
    ]
    row = row_of("DRAM", pairs, 4.0)
    assert (row["cached_tokens"], row["aim"]) == (48, 4.0)
    assert row["ratios"] == pytest.approx((10, 4, 15))
    assert row["ratio"] == pytest.approx(10), "the median of the pairs, not of their parts"
    assert (row["first_ms"], row["again_ms"]) == (pytest.approx(2000), pytest.approx(200))
    assert (row["compute_ms"], row["wait_ms"]) == (pytest.approx(80), pytest.approx(30))
    assert row["other_ms"] == pytest.approx(100)


def test_metrics_of_prefill_nodes_are_added() -> None:
    text = (
        'isthmus_engine_seconds_total{node="prefill-0"} 1.5\n'
        'isthmus_engine_seconds_total{node="prefill-1"} 2.25\n'
        'isthmus_engine_seconds_total{node="decode-0"} 9.0\n'
    )

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text)

    async def ask() -> float:
        app = web.Application()
        app.router.add_get("/metrics", answer)
        async with TestServer(app) as server, reuse.aiohttp.ClientSession() as session:
            client = Client(session, Server(str(server.make_url("")).rstrip("/"), "m"))
            await client.until("engine_seconds_total", 3.5, 1)
            with pytest.raises(BenchError, match=r"engine_seconds_total is 3\.75, not 4, after 0\.2 s"):
                await client.until("engine_seconds_total", 4, 0.2)
            with pytest.raises(BenchError, match="not 0"):
                await client.until("engine_seconds_total", 0, 0.2)
            return await client.total("engine_seconds_total")

    assert asyncio.run(ask()) == 3.75
