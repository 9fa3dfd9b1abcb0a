"""The benchmark's own parts, and one real run with a small model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from isthmus.benchmarks import reuse
from isthmus.benchmarks.models import BENCH_MODELS, make_random_model
from isthmus.benchmarks.reuse import Answer, Client, Plan, row_of
from isthmus.benchmarks.serve import BenchError, Server


def test_a_row_is_made_of_medians() -> None:
    pairs = [
        (Answer(1.0, 0.9, 0.0, 0), Answer(0.10, 0.08, 0.03, 64)),
        (Answer(2.0, 1.9, 0.0, 0), Answer(0.50, 0.40, 0.10, 48)),
        (Answer(3.0, 2.9, 0.0, 0), Answer(0.20, 0.10, 0.02, 64)),
    ]
    row = row_of("DRAM", pairs, 4.0)
    assert (row.cached_tokens, row.aim) == (48, 4.0)
    assert row.ratios == pytest.approx((10, 4, 15))
    assert row.ratio == pytest.approx(10), "the median of the pairs, not of their parts"
    assert (row.first_ms, row.again_ms) == (pytest.approx(2000), pytest.approx(200))
    assert (row.compute_ms, row.wait_ms) == (pytest.approx(80), pytest.approx(30))
    assert row.other_ms == pytest.approx(100)


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


def test_files_leave_the_page_cache_with_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "node" / "segment"
    path.parent.mkdir()
    path.write_bytes(b"x" * 10_000)
    assert reuse.drop_from_page_cache(tmp_path) == hasattr(reuse.os, "posix_fadvise")
    assert path.read_bytes() == b"x" * 10_000


@pytest.mark.parametrize(
    "plan", [Plan(prefix_tokens=15), Plan(rounds=0), Plan(suffix_tokens=0)], ids=["prefix", "rounds", "suffix"]
)
def test_a_plan_without_anything_to_measure_is_refused(plan: Plan) -> None:
    with pytest.raises(BenchError, match="at least 16 tokens"):
        reuse.run(plan)


def test_a_prompt_longer_than_the_model_takes_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_random_model(model, **BENCH_MODELS["llama-256x8"], dtype="bfloat16", max_position_embeddings=512)
    with pytest.raises(BenchError, match="takes 512 tokens"):
        reuse.run(Plan(model, prefix_tokens=512))


def test_a_live_cluster_is_measured(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_random_model(model, **BENCH_MODELS["llama-256x8"], dtype="bfloat16")
    said: list[str] = []
    found = reuse.run(Plan(model, prefix_tokens=2000, rounds=1, folder=tmp_path), said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left"
    assert len(said) == 4
    assert [row.aim for row in found.rows] == [4.0, 2.0, None]
    for row in found.rows:
        assert row.cached_tokens >= 2000
        assert row.first_ms > 0
        assert row.ratios == (row.ratio,)
        assert row.compute_ms + row.wait_ms + row.other_ms == pytest.approx(row.again_ms)
    assert found.prefix_bytes == 125 * 16 * 2 * 8 * 2 * 64 * 2
    assert reuse.table(found).row_count == 3
    assert len(reuse.summary_lines(found)) == 2
    json.dumps(reuse.as_json(found))
