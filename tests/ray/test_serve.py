"""`isthmus serve --ray` on several machines of a Ray cluster: who joins where, what deaths cost, that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.models import bytes_folder
from isthmus.core.errors import StartError
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.models import make_model
from tests.ray.machines import EAST, SPARE, WEST, Machines, environment_of, machine_of, nodes, parent_of
from tests.served import LIMIT_S, alive, command, serve, streamed

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
RECIPE = recipe_of(bytes_folder(), bytes_folder(), 16)
CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.004}
EMULATED: dict[str, Any] = {"placement": "ray", "engine": {"kind": "emulated", "cost": CURVE}}
CLUSTERS = {
    "clusters": {"east": {"roles": {"prefill": 1}}, "west": {"roles": {"prefill": 1, "decode": 1}}},
    "links": [{"between": ["east", "west"], "gbps": 10, "emulate": "none"}],
    "offload": {"threshold": 100},
}
PROMPT = [at % 200 for at in range(600)]
SHORT = [1, 2, 3]


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(RECIPE, prompt, count, stop_tokens=(257,))


def test_nodes_join_from_the_machines_of_their_clusters(cluster: Machines, tmp_path: Path) -> None:
    """A long prompt prefills in one cluster and decodes in the other, over addresses of theirs; SIGTERM drains."""
    with serve(tmp_path, EMULATED | CLUSTERS | {"limits": {"drain_s": 90}}) as served:
        found = nodes()
        assert {name: machine_of(pid) for name, pid in found.items()} == {
            "east-prefill-0": EAST,
            "west-prefill-0": WEST,
            "west-decode-0": WEST,
        }
        for environment in map(environment_of, found.values()):
            assert not [name for name in environment if name.startswith("RAY_")]
            assert environment["OMP_NUM_THREADS"] == "1"
        assert served.tokens(PROMPT, 50) == expected(PROMPT, 50)
        served.wait_until(lambda: served.gauge("tokens_computed_total")["east-prefill-0"] >= 600, "it crossed")
        with ThreadPoolExecutor(1) as pool:
            answering = threading.Event()
            answer = pool.submit(streamed, served, SHORT, 300, answering)
            answering.wait()
            served.process.send_signal(signal.SIGTERM)
            assert answer.result() == expected(SHORT, 300)
        assert served.process.wait(timeout=LIMIT_S) == 0
        assert not [pid for pid in found.values() if alive(pid)]


def test_a_pipeline_group_lies_together_and_each_process_has_its_gpu(cluster: Machines, tmp_path: Path) -> None:
    """Only one of the machines has any."""
    engine = EMULATED["engine"] | {"device": "cuda"}
    roles = {"prefill": {"count": 2, "pipeline": 2}, "decode": 1}
    with serve(tmp_path, EMULATED | {"engine": engine, "roles": roles}) as served:
        found = nodes()
        assert found.keys() == {"prefill-0", "prefill-0.1", "decode-0"}
        assert set(map(machine_of, found.values())) == {WEST}
        devices = [environment_of(pid)["CUDA_VISIBLE_DEVICES"] for pid in found.values()]
        assert sorted(devices) == ["0", "1", "2"]
        assert served.tokens(PROMPT, 20) == expected(PROMPT, 20)


def test_killed_children_and_actors_cost_no_token(cluster: Machines, tmp_path: Path) -> None:
    with serve(tmp_path, EMULATED | {"roles": {"prefill": 1, "decode": 1}}) as served:
        found = nodes()
        for name, victim in [("decode-0", found["decode-0"]), ("prefill-0", parent_of(found["prefill-0"]))]:
            with ThreadPoolExecutor(1) as pool:
                answering = threading.Event()
                answer = pool.submit(streamed, served, PROMPT, 400, answering)
                answering.wait()
                os.kill(victim, signal.SIGKILL)
                served.wait_until(
                    lambda name=name: nodes().get(name) not in (None, found[name]), f"{name} is back"
                )
                assert answer.result() == expected(PROMPT, 400)
            assert f"node {name} ended" in served.story()
            assert not alive(found[name]), "the child of an actor outlived it"
            served.wait_until(lambda: served.http.get("/health").status_code == 200, "healthy again")
        assert "(killed; is there enough memory?)" in served.story()
        assert "its actor is gone" in served.story()


def test_a_machine_that_is_lost_costs_no_token(cluster: Machines, tmp_path: Path) -> None:
    """All of it at once, in the middle of four answers of a real model; the node comes back on another machine."""
    model = tmp_path / "tiny"
    make_model(model, "llama")
    lost = cluster.add(SPARE)
    prompts = [[index, 2, 3, 4] * 50 for index in range(6)]
    settings = {
        "model": str(model),
        "placement": "ray",
        "ray": {"spread": "strict"},
        "roles": {"prefill": 0, "decode": 0, "mixed": 3},
    }
    with serve(tmp_path, settings) as served:
        where = {machine_of(pid): name for name, pid in nodes().items()}
        assert where.keys() == {EAST, WEST, SPARE}
        before = [served.tokens(prompt, 300, cache_salt="before") for prompt in prompts]
        pid = nodes()[where[SPARE]]
        with ThreadPoolExecutor(len(prompts)) as pool:
            answering = threading.Event()
            answers = [pool.submit(streamed, served, prompt, 300, answering) for prompt in prompts]
            answering.wait()
            cluster.remove(lost)
            os.kill(pid, signal.SIGKILL)
            assert [answer.result() for answer in answers] == before
        assert len(served.gauge("kv_blocks")) == 2
        cluster.add(SPARE)
        served.wait_until(lambda: len(served.gauge("kv_blocks")) == 3, "the node is back")
        assert machine_of(nodes()[where[SPARE]]) == SPARE
        assert served.tokens(prompts[0], 300) == before[0]


def test_nothing_is_left_of_a_driver_that_is_killed(cluster: Machines, tmp_path: Path) -> None:
    over = False
    with pytest.raises(AssertionError), serve(tmp_path, EMULATED) as served:
        found = list(nodes().values())
        assert len(found) == 2
        served.process.kill()
        served.process.wait()
        served.wait_until(lambda: not any(map(alive, found)), "every node gone")
        over = True
    assert over


def test_what_cannot_be_placed_is_named(cluster: Machines, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    engine = EMULATED["engine"] | {"threads": 7, "kv_memory": "64MiB"}
    path.write_text(json.dumps(EMULATED | {"engine": engine, "limits": {"start_s": 2}}))
    asked = command("serve", "--port", "0", "--config", str(path))
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 4
    waiting, line = done.stderr.strip().splitlines()
    needs = (
        r"prefill-0 needs 8 CPU, \d+ MiB of memory; the most that a machine has: 6 CPU, [\d,]+ MiB of memory"
    )
    assert re.fullmatch(f"isthmus: waiting for machines: {needs}", waiting)
    assert re.fullmatch(
        rf"isthmus: error: the nodes were not ready within 2 s \(limits.start_s\): {needs}", line
    )


def test_machines_without_authentication_are_refused(
    cluster: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.live.cluster import ray_launcher

    monkeypatch.setattr(ray_launcher, "get_authentication_mode", lambda: None)
    with pytest.raises(StartError, match=r"has \d machines and no authentication"):
        ray_launcher.connect()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "RAY_ADDRESS 127.0.0.1:1: no Ray cluster can be reached there: "),
        ("nowhere", "RAY_ADDRESS nowhere: no Ray cluster can be reached there: "),
        ("ray://127.0.0.1:1", "RAY_ADDRESS ray://127.0.0.1:1: is for clients outside the cluster"),
    ],
)
def test_an_address_of_no_cluster_is_refused(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.live.cluster import ray_launcher

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(StartError) as caught:
        ray_launcher.connect()
    assert str(caught.value).startswith(said)
