"""Two clusters of processes and a link of real TCP between them: every token is checked, whatever the link does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isthmus.live.cluster.recorder import replay
from tests.inside import inside
from tests.live.cluster.kit import CURVE, RECIPE, ask, prompt_of, written
from tests.served import Client, children_of, command, node_pid, serve

from .test_joining import port as port

QUICK = CURVE | {"prefill_token_s": 1e-5}
SHORT, LONG = 100, 4000
EAST = {"roles": {"prefill": 1, "decode": 1}}
WEST = {"roles": {"prefill": 1}}


def deployment(*, clusters: dict[str, Any] | None = None, gbps: float = 1.0, **sections: Any) -> dict[str, Any]:
    """More than 1,000 uncached tokens are prefilled in the other cluster."""
    return {
        "clusters": clusters or {"east": EAST, "west": WEST},
        "links": [{"between": ["west", "east"], "gbps": gbps, "rtt_ms": 10}],
        "engine": {"kind": "emulated", "cost": QUICK, "kv_memory": "64MiB"},
        "offload": {"threshold": 1000, "control": "none", "period_s": 0.1},
        "cache": {"dram": "64MiB"},
    } | sections


def offload(served: Client) -> dict[str, Any]:
    return dict(served.http.get("/status").json()["offload"])


def link(served: Client, source: str = "west") -> dict[str, Any]:
    return next(each for each in offload(served)["links"] if each["source"] == source)


def has_received(served: Client, num_bytes: float) -> bool:
    return served.gauge("kv_bytes_in_total")["east-decode-0"] > num_bytes


def link_pid() -> int:
    """The process of the link, which this one started."""
    return node_pid(children_of(os.getpid()), "west-east")


def test_long_prompts_cross_the_link_and_short_ones_do_not(tmp_path: Path) -> None:
    recording = tmp_path / "flight.jsonl"
    with inside(deployment(record=str(recording))) as served:
        served.wait_until(lambda: offload(served)["threshold"] == 1000, "the first report of the link")
        assert ask(served, prompt_of(1, SHORT)) == 0
        assert offload(served)["requests"] == 0
        long = prompt_of(2, LONG)
        assert ask(served, long) == 0
        assert offload(served)["requests"] == 1
        assert ask(served, [*long, *prompt_of(3, 50)]) > LONG * 0.9, "the home has what was computed elsewhere"
        assert offload(served)["requests"] == 1, "uncached tokens count, not all"
        served.wait_until(
            lambda: (
                served.gauge("kv_bytes_out_total")["west-prefill-0"] == LONG * RECIPE.layout.token_bytes * 2
            ),
            "the KV that west sent",
        )
        served.wait_until(
            lambda: link(served)["sent_bytes"] >= LONG * RECIPE.layout.token_bytes * 2, "bytes over the link"
        )
        served.wait_until(lambda: (link(served)["rtt_ms"] or 0) >= 10, "its round trip")
        text = served.http.get("/metrics").text
        assert "isthmus_requests_offloaded_total 1.0" in text
        assert "isthmus_offload_threshold_tokens 1000.0" in text
        assert re.search(r'isthmus_link_bytes_total{source="west",target="east"} \S+', text)
    assert replay(recording)[1] is None, "other decisions"
    assert '"type":"LinksMeasured"' in recording.read_text()


@pytest.mark.parametrize(
    ("stop", "go_on", "link_s"),
    [(signal.SIGUSR1, signal.SIGUSR2, 600), (signal.SIGSTOP, signal.SIGCONT, 2)],
    ids=["cut", "silent"],
)
def test_a_link_that_is_cut_in_the_middle_of_transfers_fails_no_request(
    stop: signal.Signals, go_on: signal.Signals, link_s: float
) -> None:
    """What was on its way begins again at home. Restored, it is used again."""
    settings = deployment(gbps=0.001, limits={"link_s": link_s})
    prompts = [prompt_of(seed, LONG) for seed in range(4)]
    size = LONG * RECIPE.layout.token_bytes * 2
    with inside(settings) as served, ThreadPoolExecutor(len(prompts)) as pool:
        process = link_pid()
        answers = [pool.submit(ask, served, prompt) for prompt in prompts]
        served.wait_until(partial(has_received, served, size // 8), "KV on its way")
        os.kill(process, stop)
        for answer in answers:
            answer.result()
        assert offload(served)["requests"] > 0
        served.wait_until(lambda: not link(served)["up"], "a link that is down")
        cut = offload(served)["requests"]
        ask(served, prompt_of(100, LONG))
        assert offload(served)["requests"] == cut, "nothing goes over a link that is down"
        os.kill(process, go_on)
        served.wait_until(lambda: link(served)["up"], "the link is back")
        served.wait_until(lambda: offload(served)["threshold"] == 1000, "offloading is on again")
        ask(served, prompt_of(200, 1500))
        assert offload(served)["requests"] == cut + 1


def test_a_short_cut_that_sessions_outlive_costs_no_attempt(tmp_path: Path) -> None:
    recording = tmp_path / "flight.jsonl"
    settings = deployment(gbps=0.001, network={"resume_s": 30}, record=str(recording))
    with inside(settings) as served, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, served, prompt_of(seed, LONG)) for seed in range(2)]
        served.wait_until(partial(has_received, served, 1 << 14), "KV on its way")
        os.kill(link_pid(), signal.SIGUSR1)
        os.kill(link_pid(), signal.SIGUSR2)
        for answer in answers:
            answer.result()
    assert '"attempt":1' in recording.read_text() and '"attempt":2' not in recording.read_text()


def test_a_node_joins_a_cluster_by_hand(tmp_path: Path, port: int) -> None:
    """It is reached over the link as those are that were there from the start."""
    settings = deployment(clusters={"east": EAST, "west": {}}, join_port=port, token="secret")
    path = written(tmp_path, settings)

    def joining(*arguments: str) -> list[str]:
        return command("node", "--role", "prefill", "--join", f"127.0.0.1:{port}", "--config", path, *arguments)

    with serve(tmp_path, settings) as served:
        ask(served, prompt_of(1, LONG))
        assert offload(served)["requests"] == 0, "nobody is there to prefill it"
        lost = subprocess.run(joining(), capture_output=True, text=True, check=False)
        assert lost.returncode != 0 and "--cluster: give one of east, west" in lost.stderr
        with subprocess.Popen(joining("--cluster", "west", "--name", "far")) as node:
            try:
                served.wait_until(lambda: "far" in served.gauge("kv_blocks"), "the node that joined")
                served.wait_until(lambda: offload(served)["threshold"] == 1000, "the threshold")
                ask(served, prompt_of(2, LONG))
                assert offload(served)["requests"] == 1
                assert link(served)["up"]
            finally:
                node.terminate()
        served.wait_until(lambda: "far" not in served.gauge("kv_blocks"), "the node that left")
        ask(served, prompt_of(3, LONG))
        assert offload(served)["requests"] == 1
