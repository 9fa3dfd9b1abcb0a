"""A real cluster for strangers to attack, with few descriptors, beside a bystander; and what must be so afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.served import reserved_port
from isthmus.cli.models import bytes_folder
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.hostile import bystander
from tests.served import LIMIT_S, Served, alive, children_of, command, node_pid, wait_until_ready

RECIPE = recipe_of(bytes_folder(), bytes_folder(), 16)
DESCRIPTORS = 384
MODEL = "isthmus-bytes"
NODES = ("prefill-0", "decode-0")
GAP_S = 5.0
"""Between two tokens of the bystander. The aim is 0.5 s, which no slow machine keeps; measured ones are printed."""
GROWN_BYTES = 64 << 20
"""Of each process, once an act is over."""
TOLD_LINES = 30
"""Of what the cluster said, with what is wrong."""
SETTLE_S = 20.0
"""Within which memory must be back, at the latest."""
NUM_TOKENS = 30
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(100)] for seed in range(4)]
SETTINGS: dict[str, Any] = {
    "engine": {
        "kind": "emulated",
        "kv_memory": "16MiB",
        "cost": {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 1e-5, "decode_fixed_s": 0.01},
    },
    "cache": {"dram": "16MiB"},
    "token": "not told to strangers",
}


@dataclass
class Outcome:
    """What an act got to hear: HTTP statuses, "closed" for a connection that ended without one, "open" for one that
    stayed as it was."""

    heard: list[str] = field(default_factory=list)

    def add(self, *heard: object) -> None:
        self.heard += [str(each) for each in heard]


class Victim:
    """A running `isthmus serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str, join_port: int) -> None:
        self.process, self.log, self.url = process, log, url
        self.port, self.join_port = int(url.rpartition(":")[2]), join_port
        self.pids = {"head": process.pid} | {name: node_pid(children_of(process.pid), name) for name in NODES}
        self.is_well = True

    def post(self, path: str, body: dict[str, Any] | bytes, limit_s: float = LIMIT_S) -> str:
        """The status that it gets, or "closed"."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            with httpx.Client(trust_env=False, timeout=limit_s) as client:
                return str(client.post(f"{self.url}{path}", content=content, headers=headers).status_code)
        except httpx.TimeoutException:
            return "silent"
        except httpx.HTTPError:
            return "closed"

    def post_all(self, path: str, bodies: Sequence[dict[str, Any] | bytes], at_once: int = 1) -> list[str]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda body: self.post(path, body), bodies))

    def metric(self, pattern: str) -> float:
        """The sum of what is called so."""
        with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
            text = client.get(f"{self.url}/metrics").text
        return sum(map(float, re.findall(rf"^isthmus_{pattern} (\S+)$", text, re.M)))

    def memory(self) -> dict[str, int]:
        """Bytes that each process has for itself."""
        return self._bytes("RssAnon")

    def forget_peaks(self) -> None:
        """`peaks` counts from now on."""
        for pid in self.pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peaks(self) -> dict[str, int]:
        """The most bytes that each process had since, shared ones included."""
        return self._bytes("VmHWM")

    def _bytes(self, field: str) -> dict[str, int]:
        found = {}
        for name, pid in self.pids.items():
            with contextlib.suppress(OSError):
                said = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
                if said is not None:
                    found[name] = int(said[1]) << 10
        return found

    def story(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def victim(home: Path) -> Iterator[Victim]:
    """Ready, and warm: what is loaded when it is first needed is loaded."""
    log, path = home / "serve.log", home / "serve.yaml"
    with reserved_port() as join_port:
        path.write_text(json.dumps(SETTINGS | {"join_port": join_port}))
        limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh"]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*limited, *command("serve", "--port", "0", "--threads", "1", "--config", str(path))],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        children: list[int] = []
        try:
            url, _ = wait_until_ready(process, log)
            found = Victim(process, log, url, join_port)
            children = children_of(process.pid)
            with contextlib.closing(Served(process, log, url).http):
                pass
            for body in ({}, {"guided_json": {"type": "integer"}}, {"guided_regex": "[ab]+"}):
                found.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2} | body)
            yield found
            if found.is_well:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=LIMIT_S) == 0, found.story()
                assert not [pid for pid in children if alive(pid)], "a process outlived its cluster"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def attacked(target: Victim, peak_bytes: int | None = None) -> Iterator[Outcome]:
    """An act runs inside, beside a bystander; afterwards the cluster must be as it was, and the bystander served.
    `peak_bytes`: which no process may have grown by meanwhile."""
    before, start = target.memory(), len(target.story())
    target.forget_peaks()
    lowest = target.peaks()
    limits = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"model": MODEL, "temperature": 0, "return_token_ids": True} | limits
    client = subprocess.Popen(
        [sys.executable, bystander.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin is not None and client.stdout is not None
    target.is_well, outcome = False, Outcome()
    try:
        asked = {"url": target.url, "body": body, "prompts": PROMPTS}
        client.stdin.write(json.dumps(asked).encode() + b"\n")
        client.stdin.flush()
        first = [
            client.stdout.readline() for _ in PROMPTS
        ]  # each prompt was answered, or one twice: it has begun
        yield outcome
        said, _ = client.communicate(timeout=LIMIT_S)
    finally:
        client.kill()
        client.wait()
    answers = [json.loads(line) for line in [*first, *said.splitlines()]]
    peaks = {name: peak - lowest[name] for name, peak in target.peaks().items()}
    grown, story = _grown(target, before), target.story()[start:]
    told = "\n".join(story.splitlines()[-TOLD_LINES:])
    gap = max(each["gap_s"] for each in answers)
    heard = {each: outcome.heard.count(each) for each in sorted(set(outcome.heard))}
    memory = f"MiB at most {_in_mib(peaks)}, afterwards {_in_mib(grown)}"
    print(f"heard {heard}; {len(answers)} answers of others, longest gap {gap:.3f} s; {memory}")
    assert target.process.poll() is None, f"the head ended: {target.process.returncode}\n{told}"
    assert {name: alive(pid) for name, pid in target.pids.items()} == dict.fromkeys(target.pids, True), told
    lost = [each["error"] for each in answers if each["error"]]
    assert not lost, f"{len(lost)} of {len(answers)} answers of others were lost, the first: {lost[0]}\n{told}"
    for each in answers:
        assert each["tokens"] == expected_tokens(RECIPE, each["prompt"], NUM_TOKENS), "a wrong answer"
    assert "Traceback" not in story, story[story.index("Traceback") :][:5000]
    assert "500" not in outcome.heard and not target.metric(r'requests_failed_total{status="500"}')
    assert gap < GAP_S, f"others' tokens stood still for {gap:.1f} s"
    assert max(grown.values()) < GROWN_BYTES, f"memory did not come back: {_in_mib(grown)}"
    assert peak_bytes is None or max(peaks.values()) < peak_bytes, f"memory grew: {_in_mib(peaks)}"
    target.is_well = True


def _grown(target: Victim, before: dict[str, int]) -> dict[str, int]:
    """What processes have more than before, once that is little, or at the end of the time for it."""
    until = time.monotonic() + SETTLE_S
    while True:
        now = target.memory()
        grown = {name: now[name] - before[name] for name in before.keys() & now.keys()}
        if max(grown.values(), default=0) < GROWN_BYTES or time.monotonic() > until:
            return grown
        time.sleep(0.2)


def _in_mib(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size >> 20 for name, size in sizes.items()}
