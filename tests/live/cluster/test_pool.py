"""Cached blocks of a live cluster: kept beside the engine, on disk, lent and fetched; every token is checked."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.served import reserved_port
from isthmus.live.engine.emulated import expected_tokens
from tests.certificates import make_certificate
from tests.inside import inside
from tests.live.cluster.kit import BLOCK_BYTES, LONG, RECIPE, ask, flip_bits, pooled, prompt_of
from tests.served import LIMIT_S, given_up, node_pid, serve


@pytest.mark.parametrize("shared", [True, False], ids=["lent", "fetched"])
def test_prefill_nodes_use_each_others_blocks(shared: bool, tmp_path: Path) -> None:
    """`mooncake` fetches from the one that has it."""
    share = {"share": "host" if shared else "none"}
    config = pooled(LONG, roles={"prefill": 2, "decode": 2}, policy="mooncake", cache=share)
    shared_prompt = prompt_of(3, 1600)
    prompts = [shared_prompt + prompt_of(seed, 200) for seed in range(10, 26)]
    with inside(config) as served:
        assert ask(served, prompts[0]) == 0
        with served.together(8), ThreadPoolExecutor(8) as pool:
            cached = list(pool.map(lambda prompt: ask(served, prompt), prompts[1:]))
        assert max(cached) == 1600, "some may begin before the prefix has crossed"
        moved = "kv_bytes_borrowed_total" if shared else "kv_bytes_fetched_total"
        served.wait_until(lambda: served.total(moved) >= 100 * 512, "the prefix crosses once")
        served.wait_until(
            lambda: all(served.gauge("tokens_computed_total")[node] for node in ("prefill-0", "prefill-1")),
            "both worked",
        )


def test_blocks_outlive_the_cluster_and_damaged_ones_cost_time_and_no_token(tmp_path: Path) -> None:
    config = pooled(cache={"ssd": 1000 * BLOCK_BYTES, "folder": str(tmp_path / "blocks")})
    prompt = prompt_of(4, 1600)
    with inside(config) as served:
        assert ask(served, prompt) == 0
        served.wait_until(lambda: served.total("cache_disk_blocks") >= 200, "written behind")
    with inside(config) as served:
        served.wait_until(lambda: served.total("cache_disk_blocks") >= 200, "found again")
        served.check_idle()  # and the conductor knows
        assert ask(served, prompt) == 1599
        assert served.total("seal_mismatches_total") == 0
    flip_bits(tmp_path / "blocks")
    with inside(config) as served:
        assert ask(served, prompt) < 1599
        served.check_idle()  # what was computed is kept
        assert ask(served, prompt) == 1599


@pytest.mark.parametrize("form", ["lossless", "int8"])
def test_kv_is_encoded_on_a_slow_link(form: str, tmp_path: Path) -> None:
    """The conductor believes in a link of 1 Mbit/s. What int8 leaves of a digest tells another token."""
    config = pooled(
        network={"node_gbps": 0.001, "compression": form},
        cache={"share": "none"},
        roles={"prefill": 2, "decode": 1},
        policy="mooncake",
    )
    prompt = prompt_of(8, 800)
    with inside(config) as served:
        found = served.tokens(prompt, 20, ignore_eos=True)
        exact = found == expected_tokens(RECIPE, prompt, 20)
        assert exact == (form == "lossless")
        assert len(found) == 20


@pytest.mark.parametrize("whose", ["operator's", "head's"])
def test_all_sessions_over_tls(whose: str, tmp_path: Path) -> None:
    """Head, hand-over and fetch; and somebody who speaks no TLS is not let in."""
    config = pooled(
        LONG,
        tls=make_certificate(tmp_path, "ours") if whose == "operator's" else {"folder": str(tmp_path / "kept")},
        roles={"prefill": 2, "decode": 1},
        policy="mooncake",
        cache={"share": "none"},
    )
    shared = prompt_of(11, 800)
    with reserved_port() as port, inside(config | {"join_port": port}) as served:
        assert ask(served, shared) == 0
        with served.together(6), ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda seed: ask(served, shared + prompt_of(seed, 100), 5), range(200, 212)))
        served.wait_until(lambda: served.total("kv_bytes_fetched_total") >= 50 * 512, "the prefix crossed")
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as plain:
            plain.settimeout(LIMIT_S)
            plain.sendall(b"IST" * 100)
            assert plain.recv(1) in (b"", b"\x15"), "an alert, or nothing"
        assert ask(served, shared) > 0


def test_a_node_whose_folder_went_bad_comes_back_on_dram_alone(tmp_path: Path) -> None:
    """A file in its place: while the node runs, nothing happens; killed, it is started again without its SSD."""
    folder, prompt = tmp_path / "blocks", prompt_of(9, 1600)
    config = pooled(cache={"ssd": 1000 * BLOCK_BYTES, "folder": str(folder)})
    with serve(tmp_path, config) as served:
        assert ask(served, prompt) == 0
        served.wait_until(lambda: served.gauge("cache_disk_blocks")["prefill-0"] >= 100, "written behind")
        shutil.rmtree(folder / "prefill-0")
        (folder / "prefill-0").write_text("somebody's")
        assert ask(served, prompt) == 1599 and served.total("cache_degraded") == 0
        os.kill(node_pid(served.children().values(), "prefill-0"), signal.SIGKILL)
        served.wait_until(lambda: served.gauge("cache_degraded").get("prefill-0") == 1, "it is there again")
        for seed in range(20, 24):
            ask(served, prompt_of(seed, 1600))
        assert ask(served, prompt_of(23, 1600)) == 1599, "its DRAM is used"
        by_node = {node["node"]: node["cache"] for node in served.http.get("/status").json()["nodes"]}
        assert by_node["prefill-0"]["degraded"] and not by_node["decode-0"]["degraded"]
    assert (
        f"SSD tier in {folder}/prefill-0 cannot be used: File exists; prefill-0 goes on with DRAM"
        in served.story()
    )
    assert (folder / "prefill-0").read_text() == "somebody's"
    code, line = given_up("--config", str(tmp_path / "serve.yaml"), "--port", "0")
    assert code != 0 and f"SSD tier in {folder}/prefill-0 cannot be used" in line
