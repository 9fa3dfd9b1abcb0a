"""Head and nodes on machines of their own, which are network namespaces here, with TLS and over a real network stack.
Nothing is shared but the files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from isthmus.config import load_config
from isthmus.live.cluster.authority import Authority, JoinToken
from isthmus.live.engine.emulated import expected_tokens
from tests.certificates import make_certificate
from tests.live.cluster.kit import RECIPE, prompt_of
from tests.models import check_greedy, make_model
from tests.served import LIMIT_S, Client, command, node_pid, streamed, wait_until_ready

from .machines import Machine, machines

CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 1e-5, "decode_fixed_s": 0.005}
EMULATED = {"engine": {"kind": "emulated", "cost": CURVE, "kv_memory": "64MiB", "threads": 1}}
EXAMPLE = Path(__file__).parents[3] / "examples" / "slurm"
TOKEN, PORT = "a token of the test", 7000


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Machine]]:
    with machines("head", "prefill", "decode") as made:
        yield made


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "ours")


class Site:
    """Processes on these machines, with one deployment file."""

    def __init__(self, hosts: dict[str, Machine], home: Path, settings: dict[str, Any]) -> None:
        self.hosts, self.home = hosts, home
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        address = hosts["head"].address
        joins = {"placement": "join", "host": address, "port": 8000, "join_host": "0.0.0.0", "join_port": PORT}
        limits = {"limits": {"silence_s": 60, "rejoin_s": 60}}
        self.settings = {"roles": {"prefill": 1, "decode": 1}, "cache": {"dram": "64MiB"}, **joins, **limits}
        self.settings |= settings

    def start(
        self, name: str, machine: str, *arguments: str, token: str = TOKEN, **other: Any
    ) -> subprocess.Popen[bytes]:
        """`isthmus ARGUMENTS`, with what the deployment file says otherwise here."""
        file = self.home / f"{name}.yaml"
        file.write_text(json.dumps(self.settings | other))
        run = command(*arguments, "--config", str(file))
        process = self.hosts[machine].start(run, self.log_of(name), {"ISTHMUS_TOKEN": token})
        self._running[name] = process
        return process

    def head(self) -> Client:
        """A head, which is complete; nodes have been started, or are started meanwhile."""
        return Client(wait_until_ready(self.start("head", "head", "serve"), self.log_of("head"))[0])

    def node(
        self, role: str, *, name: str = "", join: str = f"head:{PORT}", token: str = TOKEN, **other: Any
    ) -> subprocess.Popen[bytes]:
        """On the machine of its role."""
        name = name or f"{role}-node"
        arguments = ("node", "--role", role, "--name", name, "--join", join)
        return self.start(name, role, *arguments, token=token, **other)

    def log_of(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def ended(self, name: str) -> tuple[int, str]:
        """Exit status and all that a process said, when it has ended."""
        status = self._running.pop(name).wait(LIMIT_S)
        return status, self.log_of(name).read_text().strip()

    def stop(self) -> None:
        """The head says so to all nodes."""
        self._running["head"].send_signal(signal.SIGTERM)
        for name in list(self._running):
            status, said = self.ended(name)
            assert status == 0, f"{name}: {said}"
            assert name == "head" or said.endswith(f"{name}: stopped by the head")

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.home.glob("*.log")))


@pytest.fixture
def site(hosts: dict[str, Machine], tls: dict[str, str], tmp_path: Path) -> Iterator[Site]:
    made = Site(hosts, tmp_path, {"tls": tls, **EMULATED})
    try:
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.kill()


def check(served: Client, seed: int, length: int = 200, count: int = 20) -> None:
    """Each token of the emulated engine is a digest of every byte of KV before it."""
    prompt = prompt_of(seed, length)
    assert served.tokens(prompt, count, ignore_eos=True) == expected_tokens(RECIPE, prompt, count)


def sent(served: Client) -> float:
    return served.gauge("kv_bytes_out_total").get("prefill-node", 0)


def came(served: Client) -> float:
    return served.gauge("kv_bytes_in_total").get("decode-node", 0)


def test_a_model_on_three_machines_says_what_it_says_in_one_process(site: Site) -> None:
    """Nodes that start before their head wait for it."""
    folder = site.home / "model"
    make_model(folder, "llama")
    site.settings |= {"model": str(folder), "engine": {"kv_memory": "64MiB", "threads": 1}}
    for role in ("prefill", "decode"):
        site.node(role)
    served = site.head()
    with contextlib.closing(served.http), ThreadPoolExecutor(4) as pool:
        prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 17, 64, 300))]
        for prompt, tokens in zip(
            prompts, pool.map(lambda prompt: served.tokens(prompt, 32), prompts), strict=True
        ):
            assert len(tokens) == 32
            check_greedy(folder, prompt, tokens)
        served.wait_until(lambda: 0 < sent(served) == came(served), "all KV that was sent has come")
        site.stop()


def test_a_node_that_is_killed_joins_again_and_no_token_is_lost(site: Site) -> None:
    process = [site.node(role) for role in ("prefill", "decode")][1]
    served = site.head()
    with contextlib.closing(served.http), ThreadPoolExecutor(1) as pool:
        prompt, answering = prompt_of(0, 200), threading.Event()
        answer = pool.submit(streamed, served, prompt, 200, answering, ignore_eos=True)
        assert answering.wait(LIMIT_S)
        process.kill()
        assert site.ended("decode-node")[0] == -signal.SIGKILL
        served.wait_until(lambda: served.http.get("/health").status_code == 503, "it is missed")
        site.node("decode")
        served.wait_until(lambda: served.http.get("/health").status_code == 200, "it is back")
        assert answer.result(LIMIT_S) == expected_tokens(RECIPE, prompt, 200)
        check(served, 10)
        site.stop()


def test_a_node_whose_head_is_gone_ends_and_joins_the_next(site: Site) -> None:
    for role in ("prefill", "decode"):
        site.node(role)
    with contextlib.closing(site.head().http):
        site._running["head"].kill()
        site.ended("head")
        for role in ("prefill", "decode"):
            status, said = site.ended(f"{role}-node")
            told = f"isthmus: error: {role}-node: the session with the head ended: "
            assert status == 4 and said.splitlines()[-1].startswith(told), said
    for role in ("prefill", "decode"):
        site.node(role)
    served = site.head()
    with contextlib.closing(served.http):
        check(served, 1)
        site.stop()


def test_a_node_joins_those_that_serve_starts_itself(site: Site) -> None:
    """These are reached where the head listens."""
    address = site.hosts["head"].address
    site.settings |= {"placement": "local", "policy": "round_robin", "join_host": address}
    served = site.head()
    with contextlib.closing(served.http):
        site.node("prefill")
        served.wait_until(lambda: "prefill-node" in served.gauge("kv_blocks"), "it has joined")
        for seed in range(4):
            check(served, seed)
        served.wait_until(lambda: 0 < sent(served) < served.total("kv_bytes_out_total"), "both have prefilled")
        site.stop()


JOINING = ("node", "--role", "decode")


def joining(site: Site, head: str) -> str:
    """What a head says that nodes join with."""
    until = time.monotonic() + LIMIT_S
    while not (found := re.search(r"--join (isthmus://\S+)\n", site.log_of(head).read_text())):
        assert time.monotonic() < until, site.logs()
        time.sleep(0.05)
    return found[1]


def test_nodes_join_with_the_line_that_serve_prints(site: Site) -> None:
    """No file of theirs, no token: there is TLS since the head is at no loopback address. A head that is started again
    has the same line where its authority is kept."""
    address = site.hosts["head"].address
    del site.settings["tls"]
    folder = {"tls": {"folder": str(site.home / "authority")}}
    site.settings["join_host"] = address
    site.start("head", "head", "serve", token="", **folder)
    join = joining(site, "head")
    assert join.startswith(f"isthmus://{address}:{PORT}#")
    site._running["head"].kill()
    site.ended("head")
    head = site.start("head", "head", "serve", token="", **folder)
    assert joining(site, "head") == join
    for role in ("prefill", "decode"):
        site.node(role, join=join, token="")
    served = Client(wait_until_ready(head, site.log_of("head"))[0])
    with contextlib.closing(served.http):
        check(served, 1)
        known = JoinToken.parse(join)
        others = {
            "plain": (known.address, "has one of the two TLS, and the other none?"),
            "another": (
                str(replace(known, pin=Authority.made().pin)),
                "of another authority than the join token",
            ),
            "guessed": (str(replace(known, secret="guessed")), "its cluster token is wrong"),
            "decode-node": (join, "a node named decode-node is here already"),
        }
        for name, (line, told) in others.items():
            site.start(f"{name}.2", "decode", *JOINING, "--name", name, "--join", line)
            status, said = site.ended(f"{name}.2")
            assert status == 4 and told in said, said
        check(served, 2)
        site.stop()


def test_addresses_may_be_of_ipv6(site: Site) -> None:
    address = site.hosts["head"].address6
    site.settings |= {"join_host": "::", "host": address}
    for role in ("prefill", "decode"):
        site.node(role, join=f"[{address}]:{PORT}")
    served = site.head()
    with contextlib.closing(served.http):
        check(served, 1)
        site.stop()


SRUN = """#!/bin/sh
# Starts task N of a job in machine N, as srun would.
shift  # its only option
task=0
for space in {spaces}; do
    SLURM_PROCID=$task ip netns exec $space "$@" > {home}/task-$task.log 2>&1 &
    task=$((task + 1))
done
trap 'kill $(jobs -p)' TERM
wait
wait
"""
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""


def test_the_job_for_slurm_serves(hosts: dict[str, Machine], tls: dict[str, str], tmp_path: Path) -> None:
    """Slurm is not here: what its two commands do for this job is done by two scripts."""
    deployment = load_config(EXAMPLE / "deployment.yaml", {}).model_dump(exclude_unset=True)
    file, folder = tmp_path / "deployment.yaml", tmp_path / "bin"
    file.write_text(json.dumps(deployment | {"tls": tls, "host": hosts["head"].address, **EMULATED}))
    folder.mkdir()
    spaces = " ".join(host.space for host in hosts.values())
    isthmus = f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n'
    scripts = {"srun": SRUN.format(spaces=spaces, home=tmp_path), "scontrol": SCONTROL, "isthmus": isthmus}
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", "CONFIG": str(file)}
    environment |= {"SLURM_JOB_NODELIST": ",".join(hosts)}
    log = tmp_path / "task-0.log"
    log.touch()
    job = subprocess.Popen(
        ["bash", str(EXAMPLE / "isthmus.sbatch")], env=os.environ | environment, start_new_session=True
    )
    try:
        url, nodes = wait_until_ready(job, log)
        assert nodes == {"prefill-1", "decode-2"}
        served = Client(url)
        with contextlib.closing(served.http):
            check(served, 1)
            before = set(group_of(job))
            os.kill(node_pid(before, "decode-2"), signal.SIGKILL)
            served.wait_until(lambda: has_node(set(group_of(job)) - before), "another process")
            served.wait_until(lambda: served.http.get("/health").status_code == 200, "it was started again")
            check(served, 2)
        os.kill(node_pid(group_of(job), "serve"), signal.SIGTERM)
        assert job.wait(LIMIT_S) == 0 and not group_of(job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def has_node(pids: set[int]) -> bool:
    with contextlib.suppress(AssertionError, OSError):
        return node_pid(pids, "decode-2") > 0
    return False


def group_of(job: subprocess.Popen[bytes]) -> list[int]:
    """What it started, and what that did."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(each.name)) == job.pid and each.name != str(job.pid):
                found.append(int(each.name))
    return found
