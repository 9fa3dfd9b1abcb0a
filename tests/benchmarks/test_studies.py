"""Whole studies in small, and how their figures are made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks import accuracy, reuse, wan
from benchmarks.accuracy import BLOCK_SIZE, NUM_IDLE, NUM_WARM, Times, compare
from benchmarks.peers.mooncake import process
from benchmarks.reuse import Answer, Client, row_of
from isthmus.bench import BenchError, engine
from isthmus.bench.serve import Server
from isthmus.core.cost import Curve, to_mapping
from isthmus.lab.sim.workloads import Request
from tests.benchmarks.conftest import Study, program


def test_a_simulated_cluster_is_heard_again(study: Study) -> None:
    options = ("--nodes", 6, "--blocks", 20_000, "--prompt-blocks", 100, "--decisions", 300)
    split, mixed = study("conductor", *options)[0]
    assert (split["cluster"], mixed["cluster"]) == ("3 prefill, 3 decode", "6 mixed")
    for found in (split, mixed):
        assert found["decisions"] == 300
        assert found["decisions_per_s"] == pytest.approx(1e6 / found["mean_us"])
        assert found["p50_us"] <= found["p99_us"] <= found["max_us"]
        assert found["indexed_blocks"] > 15_000, "the caches are full"
        assert min(found["queued"], found["copying"], found["fetches"]) > 0
        assert 0.1 < found["matched_share"] < 0.9
        assert found["events"] > 3 * 300


def test_a_long_path_with_a_short_one(monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    monkeypatch.setattr(wan, "PIECE_BYTES", 64 << 10)
    path = ("--delay-ms", 1, "--jitter-ms", 0.5, "--stall-s", 0.02, "--window", "256KiB", "--seconds", 0.004)
    rows, shown = study("wan", "--rates", 1, "--connections", 2, *path, "--rounds", 1)
    assert [(row["rate_gbps"], row["delay_ms"], row["connections"]) for row in rows] == [(1, 1.0, 2)] * 2
    assert [row["stalled"] for row in rows] == [False, True]
    assert all(row["gbps"] > 0 and row["share_of_rate"] == row["gbps"] / row["rate_gbps"] for row in rows)
    assert "1 for 0.02 s" in shown


def test_the_engine_beside_transformers(tiny: Path, monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    cases = [engine.Case("prefill", (40,)), engine.Case("decode", (3, 40), 4)]
    monkeypatch.setattr(engine, "cases", lambda max_length: cases)
    rows, shown = study("engine", "--model", tiny, "--rounds", 1)
    assert [row["case"] for row in rows] == ["prefill", "decode"]
    assert all(min(row["isthmus"], row["transformers"]) > 0 for row in rows) and "/ transformers" in shown


def test_a_python_without_mooncake(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="No module named 'mooncake'"):
        process(program(tmp_path / "python", "-S"), "transfer", "4096")


def test_equal_blocks_are_equal_tokens() -> None:
    one, two = Request(0, 40, 5, (1, 2, 3)), Request(0, 37, 5, (1, 2, 9))
    first, second = accuracy.prompt_of(one, "a"), accuracy.prompt_of(two, "a")
    assert (len(first), len(second)) == (40, 37)
    assert first[: 2 * BLOCK_SIZE] == second[: 2 * BLOCK_SIZE]
    assert first[2 * BLOCK_SIZE :][:5] != second[2 * BLOCK_SIZE :][:5]
    assert first != accuracy.prompt_of(one, "b")
    assert max(first) < 256


def test_only_what_comes_after_the_idle_requests_is_compared() -> None:
    warm, idle = [Times(9.0, 9.0, 9.0)] * NUM_WARM, [Times(0.06, 0.012, 0.02)] * NUM_IDLE
    model_idle = [Times(0.05, 0.01, 0.01)] * NUM_IDLE
    live = [*warm, *idle, Times(0.1, 0.02, 0.04), Times(0.3, 0.02, 0.04)]
    simulated = [*warm, *model_idle, Times(0.1, 0.018, 0.03), Times(0.28, 0.018, 0.03)]
    found = compare(live, simulated)
    assert found["overhead_first_ms"] == pytest.approx(10)
    assert found["overhead_gap_ms"] == pytest.approx(2)
    rows = {(row["quantity"], row["figure"]): row for row in found["rows"]}
    ttft, tpot, tbt = (rows[name, "mean"] for name in ("TTFT", "TPOT", "TBT (longest tenth)"))
    assert (ttft["live_ms"], rows["TTFT", "P90"]["live_ms"]) == (pytest.approx(200), pytest.approx(300))
    assert ttft["error_percent"] == pytest.approx(-5)
    assert ttft["corrected_ms"] == pytest.approx(200)
    assert tpot["corrected_error_percent"] == pytest.approx(0)
    assert tbt["corrected_error_percent"] == pytest.approx(-20)


def test_emulated_engines_are_near_the_simulator(tmp_path: Path, study: Study) -> None:
    """A live cluster for a second; how near is not judged here, where the machine is as busy as it is."""
    curve = Curve(2048, 4, prefill_token_s=1e-5, prefill_fixed_s=2e-3, decode_fixed_s=2e-3, origin="made up")
    (tmp_path / "curve.yaml").write_text(yaml.safe_dump(to_mapping(curve)))
    options = ("--emulated", "--requests", 10, "--rate", 20, "--cost", tmp_path / "curve.yaml")
    found, shown = study("accuracy", *options)
    assert (found["requests"], found["curve"], len(found["rows"])) == (10, "made up", 6)
    assert all(row["live_ms"] > 0 and row["simulated_ms"] > 0 for row in found["rows"])
    assert "overhead of an idle request" in shown


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
