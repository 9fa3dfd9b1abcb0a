"""Starts two clusters on this machine, shows what crosses the link between them, and cuts it.

    python examples/two-datacenters/run.py [--model FOLDER] [--cut-s 3]

Without --model it makes a tiny random Qwen3-Next, three quarters of whose layers keep a recurrent state in place of
KV, with transformers; where that is not installed, the default model is served. Every answer is compared with
that of one cluster without a link.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_S, ANSWER_S = 120, 120
LENGTHS = (60, 400, 1000, 1001, 2000, 3500)
NUM_TOGETHER, NUM_CUT = 12, 4
ANSWER_TOKENS = 24


class Cluster:
    """A running `isthmus serve`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url
        self.model = self._get("/v1/models")["data"][0]["id"]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as reply:
            return json.load(reply)

    def ask(self, prompt: list[int]) -> tuple[str, list[int]]:
        """Request id and greedy answer. Raises OSError when the request fails."""
        fields = {"model": self.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body = json.dumps(fields | {"ignore_eos": True, "return_token_ids": True}).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + "/v1/completions", body, head)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            answer = json.load(reply)
        return answer["id"], answer["choices"][0]["token_ids"]

    def link(self) -> dict[str, Any]:
        """From west to east."""
        return next(each for each in self._get("/status")["offload"]["links"] if each["source"] == "west")

    def link_process(self) -> int:
        """The child that carries the link."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
        )
        for line in listed.stdout.splitlines():
            pid, parent, command = line.split(maxsplit=2)
            if int(parent) == self.process.pid and "isthmus link" in command:
                return int(pid)
        raise SystemExit("no process carries the link: is it `emulate: none`?")


@contextlib.contextmanager
def serve(*arguments: str) -> Iterator[Cluster]:
    """Started and, at the end, drained."""
    with tempfile.NamedTemporaryFile("r") as log:
        command = [sys.executable, "-u", "-m", "isthmus", "serve", "--port", "0", *arguments]
        with open(log.name, "wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START_S
            while not (found := re.search(r" at (http://\S+) with (.*) \(ready", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"isthmus serve did not start:\n{Path(log.name).read_text()}")
                time.sleep(0.1)
            print(f"started: {found[2]}")
            yield Cluster(process, found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def make_model(folder: Path) -> list[str]:
    """The arguments that serve it."""
    sys.path.insert(0, str(HERE.parents[1]))
    try:
        from tests.live.engine.hybrids import save_tiny
    except ImportError as error:
        print(f"serving the default model, which keeps KV in all layers ({error})")
        return []
    save_tiny("qwen3_next", folder, linear_value_head_dim=16)
    return ["--model", str(folder)]


def prompt_of(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


def prefilled(recording: Path) -> dict[str, list[str]]:
    """Request -> the nodes that each of its attempts was prefilled on, by the flight recording."""
    found: dict[str, list[str]] = {}
    for line in recording.read_text().splitlines()[1:]:
        for action in json.loads(line)["actions"]:
            if action["type"] == "Route":
                found.setdefault(action["request"], []).append(action["prefill"])
    return found


def one_by_one(cluster: Cluster, recording: Path, expected: dict[int, list[int]]) -> None:
    print(f"\n{'prompt':>8}  {'prefilled on':<16} {'crossed the link':>17}  same tokens as one cluster")
    for length in LENGTHS:
        before = cluster.link()["sent_bytes"]
        name, tokens = cluster.ask(prompt_of(length, length))
        time.sleep(1.6)  # nodes report twice a second, links are measured every second
        crossed = cluster.link()["sent_bytes"] - before
        node = prefilled(recording)[f"{name}-0"][-1]
        print(f"{length:>8}  {node:<16} {crossed / 2**20:>13.2f} MiB  {tokens == expected[length]}")


def together(cluster: Cluster) -> None:
    """How fast the link gets when many prompts use it at once."""
    prompts = [prompt_of(seed, max(LENGTHS)) for seed in range(100, 100 + NUM_TOGETHER)]
    before, fastest = cluster.link()["sent_bytes"], 0.0
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(cluster.ask, prompt) for prompt in prompts]
        while not all(future.done() for future in asked):
            fastest = max(fastest, cluster.link()["gbps"])
            time.sleep(0.2)
        for future in asked:
            future.result()
    time.sleep(1.6)
    link = cluster.link()
    fastest, crossed = max(fastest, link["gbps"]), link["sent_bytes"] - before
    rated, rtt_ms = link["rated_gbps"], link["rtt_ms"]
    print(
        f"\n{len(prompts)} prompts of {max(LENGTHS)} tokens at once: {crossed / 2**20:.1f} MiB crossed the link,"
    )
    print(
        f"up to {fastest:.3f} of {rated:g} Gbit/s in one second, with a round trip of {rtt_ms:.0f} ms at the end"
    )


def cut(
    cluster: Cluster, recording: Path, prompts: list[list[int]], expected: list[list[int]], cut_s: float
) -> int:
    """Cuts the link while the KV of all prompts crosses it; returns how many requests failed."""
    process, before = cluster.link_process(), cluster.link()["sent_bytes"]
    print(
        f"\n{len(prompts)} prompts of {len(prompts[0])} tokens at once; the link is cut while their KV crosses it"
    )
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(cluster.ask, prompt) for prompt in prompts]
        while (crossed := cluster.link()["sent_bytes"] - before) < 1 << 18:
            time.sleep(0.02)
        os.kill(process, signal.SIGUSR1)
        print(f"cut, with {crossed / 2**20:.2f} MiB across")
        time.sleep(cut_s)
        failed, names, same = 0, [], 0
        for future, tokens in zip(asked, expected, strict=True):
            try:
                name, answer = future.result()
            except OSError as error:
                failed += 1
                print(f"failed: {error}")
            else:
                names.append(name)
                same += answer == tokens
    tried = prefilled(recording)
    for name in names:
        print(f"  prefilled on {', then on '.join(tried[f'{name}-0'])}")
    print(f"{failed} failed requests; {same} of {len(prompts)} answers are those of one cluster")
    print(f"the link is {'up' if cluster.link()['up'] else 'DOWN'}")
    os.kill(process, signal.SIGUSR2)
    return failed + len(names) - same


def come_back(cluster: Cluster, recording: Path) -> None:
    """Asks until a prompt is prefilled in west again."""
    restored = time.monotonic()
    seed = 1000
    while time.monotonic() < restored + 60:
        name, _ = cluster.ask(prompt_of(seed, 1500))
        node = prefilled(recording)[f"{name}-0"][-1]
        if node.startswith("west"):
            print(f"restored; {time.monotonic() - restored:.1f} s later a prompt was prefilled on {node} again")
            return
        seed += 1
        time.sleep(0.5)
    raise SystemExit("offloading did not resume within 60 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder")
    parser.add_argument("--cut-s", type=float, default=3.0, help="how long the link stays cut, in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", options.model] if options.model else make_model(Path(folder) / "tiny")
        config, recording = str(HERE / "config.yaml"), Path(folder) / "flight.jsonl"
        prompts = [prompt_of(seed, max(LENGTHS)) for seed in range(NUM_CUT)]
        shape = ("--kv-memory", "128MiB", "--threads", "1", "--prefill", "1", "--decode", "1")
        with serve(*model, *shape) as one:
            expected = {length: one.ask(prompt_of(length, length))[1] for length in LENGTHS}
            answers = [one.ask(prompt)[1] for prompt in prompts]
        with serve("--config", config, *model, "--record", str(recording)) as two:
            one_by_one(two, recording, expected)
            together(two)
            wrong = cut(two, recording, prompts, answers, options.cut_s)
            come_back(two, recording)
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
