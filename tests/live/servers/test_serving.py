"""Whole clusters whose nodes have vLLM servers, stood in for by `fake_server.py`: what a user sees, and what they see.

Tokens are digests of all before them and of the KV that was used, so each exact answer says that all of that was right.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.served import reserved_port
from isthmus.config import load_config
from isthmus.live.servers.server import ServerSockets, arguments_of
from tests.models import EOS, make_model
from tests.served import LIMIT_S, Served, alive, node_pid, serve, streamed

from .fake_server import digest, expected_tokens, stand_in, two_ports, url_of

BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
"""Of three layers: 16 tokens, K and V, two heads of 16 numbers."""
BLOCKS = 5
"""Full ones of a prompt."""
FEW, MANY = 56, 14
"""Blocks of a server with little memory, and so many prompts that six blocks of each do not fit."""
NOW = ("running", "kept_now", "saving")
"""What a server says of itself as it is; all else it counts."""
GAINED = ("vllm_blocks_saved_total", "cache_memory_blocks", "seal_mismatches_total", "kv_blocks_evicted_total")
SHAPES: dict[str, dict[str, int]] = {
    "mixed": {"mixed": 1, "prefill": 0, "decode": 0},
    "1P1D": {"prefill": 1, "decode": 1},
    "2P2D": {"prefill": 2, "decode": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    make_model(folder, "llama", eos_token_id=EOS)
    return folder


class Cluster:
    """`served`, and the servers of its nodes, one test after the other: `begin` starts counting anew."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.folder = served, folder
        self._number = 100

    def begin(self) -> None:
        """For a test: servers without faults, and prompts that nobody has seen."""
        self._number += 1
        self._counted: dict[str, dict[str, int]] = {}
        self.served.be_told()
        self._told = {name: self.served._last(name) for name in GAINED}
        for node in self.served._last("kv_blocks"):
            self.fault(node, token_s=0, hold=0, refuse=0, die=0, drift=0)
            self._counted[self.url(node)] = self.counts(node)

    def prompts(self, count: int, length: int = 93) -> list[list[int]]:
        """Of which no two begin alike."""
        return [[self._number, each, *range(2, length)] for each in range(1, count + 1)]

    @property
    def prompt(self) -> list[int]:
        """With five full blocks."""
        return [self._number, *range(2, 93)]

    def url(self, node: str) -> str:
        found = self.known(node)
        assert found is not None
        return found

    def known(self, node: str) -> str | None:
        """None while there is no process of it, or no server of that."""
        try:
            return url_of(self.folder, node_pid(self.served.children().values(), node))
        except (AssertionError, OSError):
            return None

    def counts(self, node: str) -> dict[str, int]:
        url = self.url(node)
        found, before = httpx.get(f"{url}/counts", timeout=LIMIT_S).json(), self._counted.get(url, {})
        return {name: count - (name not in NOW and before.get(name, 0)) for name, count in found.items()}

    def gained(self, name: str) -> dict[str, float]:
        """A metric by node, less what it was."""
        return {node: value - self._told[name].get(node, 0) for node, value in self.served.gauge(name).items()}

    def fault(self, node: str, **fault: float) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):  # one that ends it
            httpx.post(f"{self.url(node)}/fault", json=fault, timeout=LIMIT_S).raise_for_status()

    def total(self, name: str) -> int:
        return sum(self.counts(node).get(name, 0) for node in self.served._last("kv_blocks"))

    def check(self) -> None:
        """No KV was used that was not the right one, and nothing is held for anybody."""
        for name in NOW:
            self.served.wait_until(lambda name=name: not self.total(name), f"no {name}")  # type: ignore[misc]
        for name in ("wrong_blocks", "reads_of_nothing", "params_lost"):
            assert not self.total(name), name
        self.served.check_idle()


class Clusters:
    """One of each kind, of the shape that was asked for last: tests of one shape stand side by side."""

    def __init__(self, folder_of: Callable[[str], Path], model: Path) -> None:
        self._folder_of, self._model = folder_of, model
        self._running: dict[str, tuple[str, Cluster, contextlib.ExitStack]] = {}

    @contextlib.contextmanager
    def of(self, kind: str, shape: str) -> Iterator[Cluster]:
        """Where a test failed, nobody goes on."""
        found = self._get(kind, shape)
        try:
            found.begin()
            yield found
        except BaseException:
            with contextlib.suppress(BaseException):
                self._running.pop(kind)[2].__exit__(*sys.exc_info())
            raise

    def _get(self, kind: str, shape: str) -> Cluster:
        if kind in self._running:
            known, found, _ = self._running[kind]
            if known == shape and found.served.process.poll() is None:
                return found
            self._running.pop(kind)[2].close()
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(cluster(self._folder_of(f"{kind}-{shape}-"), self._model, kind, shape))
            self._running[kind] = shape, found, stack.pop_all()
        return found

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for _, _, each in self._running.values():
                stack.push(each)


@pytest.fixture(scope="module")
def clusters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    with contextlib.closing(Clusters(tmp_path_factory.mktemp, model)) as found:
        yield found


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextlib.contextmanager
def cluster(home: Path, model: Path, kind: str, shape: str) -> Iterator[Cluster]:
    engine = {
        "kind": "vllm",
        "device": "cpu",
        "block_size": 16,
        "kv_memory": BLOCK_BYTES * FEW if shape == "mixed" else 1 << 23,
        "vllm": {"transfer": kind, "env": stand_in(home)},
    }
    settings: dict[str, Any] = {
        "model": str(model), "engine": engine, "roles": SHAPES[shape], "limits": {"drain_s": 90}
    }  # fmt: skip
    if kind == "pool":
        settings["cache"] = {"dram": "16MiB"}
    with serve(home, settings) as served:
        yield Cluster(served, home)


each_kind = pytest.mark.parametrize("kind", ["pool", "nixl"])


def check_answers(found: Cluster) -> None:
    """One by one and eight at once; what was computed before is not computed again."""
    served = found.served
    prompts = [prompt[: 20 + 9 * number] for number, prompt in enumerate(found.prompts(8), 1)]
    expected = [expected_tokens(prompt, 20) for prompt in prompts]
    assert served.tokens(prompts[7], 20) == expected[7]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: served.tokens(prompt, 20), prompts)) == expected
    answer = served.complete(prompts[7], 20)
    assert answer["choices"][0]["token_ids"] == expected[7]
    assert cached(answer) == 80
    found.check()


# One node, with little memory.


def test_what_gave_way_in_the_server_is_computed_again(clusters: Clusters) -> None:
    """It says so in its events: nobody counts on it."""
    with clusters.of("nixl", "mixed") as found:
        prompts = found.prompts(MANY)
        for prompt in prompts:
            answer = found.served.complete(prompt, 8)
            assert (answer["choices"][0]["token_ids"], cached(answer)) == (expected_tokens(prompt, 8), 0)
        assert cached(found.served.complete(prompts[-1], 8)) == 80
        assert cached(found.served.complete(prompts[0], 8)) == 0
        found.served.wait_until(
            lambda: 0 < found.served.total("kv_blocks_cached") <= FEW, "no more than there are"
        )
        assert found.gained("kv_blocks_evicted_total")["mixed-0"] > 0
        found.check()


def test_a_block_damaged_in_memory_is_computed_again_and_kept(clusters: Clusters) -> None:
    with clusters.of("pool", "mixed") as found:
        served, prompts = found.served, found.prompts(MANY)

        def ask(prompt: list[int]) -> int:
            """What was loaded for it, after others made its KV give way in the server."""
            before = found.counts("mixed-0").get("blocks_loaded", 0)
            for each in (*prompts[1:], prompt):
                assert served.tokens(each, 8) == expected_tokens(each, 8)
            served.wait_until(lambda: not served.total("node_requests_running"), "all is told")
            return found.counts("mixed-0").get("blocks_loaded", 0) - before

        def kept() -> bool:
            return found.gained("cache_memory_blocks")["mixed-0"] == len(prompts) * (BLOCKS + 1)

        ask(prompts[0])
        served.wait_until(kept, "all is saved")
        before = ask(prompts[0])
        damage(served, "mixed-0", digest(prompts[0][:48]))
        assert ask(prompts[0]) == before - BLOCKS and found.total("loads_failed") == 1
        served.wait_until(lambda: found.gained("seal_mismatches_total")["mixed-0"] == 1, "it is counted")
        served.wait_until(kept, "it is kept")
        assert ask(prompts[0]) == before and found.total("loads_failed") == 1
        found.check()


def damage(served: Served, node: str, content: bytes) -> None:
    """A byte of this block in the node's memory for cached KV."""
    pid = node_pid(served.children().values(), node)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    where = next(line for line in maps if "isthmus-arena" in line and "rw-s" in line).split()[0]
    start, end = (int(each, 16) for each in where.split("-"))
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        at = start + os.pread(memory.fileno(), end - start, start).index(content)
        os.pwrite(memory.fileno(), bytes([content[0] ^ 1]), at)


# One that prefills and one that decodes.


def test_where_it_decodes_the_blocks_of_where_it_prefilled_are_used(clusters: Clusters) -> None:
    with clusters.of("pool", "1P1D") as found:
        answer = found.served.complete(found.prompt, 40)
        assert answer["choices"][0]["token_ids"] == expected_tokens(found.prompt, 40)
        assert cached(answer) == 0
        assert found.counts("decode-0")["blocks_loaded"] == BLOCKS
        assert found.served.gauge("vllm_blocks_saved_total").keys() == {"prefill-0", "decode-0"}
        found.served.wait_until(
            lambda: found.gained("vllm_blocks_saved_total")["prefill-0"] == BLOCKS, "blocks are saved"
        )
        assert found.total("loads_failed") == 0
        found.check()


def test_a_prompt_gets_the_blocks_of_an_answer_from_where_that_was_decoded(clusters: Clusters) -> None:
    with clusters.of("pool", "1P1D") as found:
        served, said = found.served, expected_tokens(found.prompt, 400)
        assert served.tokens(found.prompt, 400) == said
        known = (len(found.prompt) + 399) // 16
        served.wait_until(
            lambda: found.gained("vllm_blocks_saved_total")["decode-0"] == known - BLOCKS, "the answer is saved"
        )
        again = [*found.prompt, *said, 1, 2, 3]
        answer = served.complete(again, 8)
        assert answer["choices"][0]["token_ids"] == expected_tokens(again, 8)
        assert cached(answer) == 16 * known
        assert found.counts("prefill-0")["blocks_loaded"] == known - BLOCKS, "the rest it had itself"
        found.check()


@each_kind
def test_tenants_share_nothing(kind: str, clusters: Clusters) -> None:
    with clusters.of(kind, "1P1D") as found:
        expected = expected_tokens(found.prompt, 8)
        for salt, seen in (("", 0), ("one", 0), ("two", 0), ("one", 80), ("two", 80), ("", 80)):
            fields = {"cache_salt": salt} if salt else {}
            answer = found.served.complete(found.prompt, 8, **fields)
            assert (answer["choices"][0]["token_ids"], cached(answer)) == (expected, seen)
        found.check()


@each_kind
def test_a_disconnect_ends_the_request_in_the_server(kind: str, clusters: Clusters) -> None:
    with clusters.of(kind, "1P1D") as found:
        found.fault("decode-0", token_s=0.02)
        with found.served.http.stream("POST", "/v1/completions", json=body_of(found, 2000)) as reply:
            lines = reply.iter_lines()  # kept: dropping it would close the connection
            assert "token_ids" in next(lines)
        found.served.wait_until(lambda: found.counts("decode-0").get("aborted") == 1, "it is aborted")
        found.check()


def test_what_a_server_keeps_for_another_is_let_go_of_when_nobody_comes(clusters: Clusters) -> None:
    with clusters.of("nixl", "1P1D") as found:
        found.fault("decode-0", hold=1)
        connection = http.client.HTTPConnection(found.served.url.removeprefix("http://"), timeout=120)
        with contextlib.closing(connection):  # no header comes before the first token does
            connection.request(
                "POST", "/v1/completions", json.dumps(body_of(found, 20)), {"Content-Type": "application/json"}
            )
            found.served.wait_until(lambda: found.counts("decode-0")["running"] == 1, "it is passed")
            assert found.counts("prefill-0")["kept_now"] == 1
        found.served.wait_until(lambda: found.counts("prefill-0").get("released") == 1, "it is let go of")
        found.check()


def body_of(found: Cluster, max_tokens: int) -> dict[str, Any]:
    return {"model": found.served.model, "prompt": found.prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "return_token_ids": True}  # fmt: skip


@pytest.mark.parametrize("fault", ["refuse", "die"])
@each_kind
def test_a_request_that_a_server_fails_is_routed_again(kind: str, fault: str, clusters: Clusters) -> None:
    with clusters.of(kind, "1P1D") as found:
        for node in ("prefill-0", "decode-0") if fault == "refuse" else ("decode-0",):
            found.fault(node, **{fault: 1})
            assert found.served.tokens(found.prompt, 20) == expected_tokens(found.prompt, 20)
            assert found.counts(node)["refused" if fault == "refuse" else "died"] == 1
        found.check()


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": OBJECT}}
LETTERS = {"structured_outputs": {"regex": "[a-z]{60}"}}
PENALTY = {"presence_penalty": 0.5, "ignore_eos": True}


@each_kind
def test_answers_follow_their_grammars(kind: str, clusters: Clusters) -> None:
    """Their ends are end tokens, also of requests that ignore those."""
    with clusters.of(kind, "1P1D") as found:

        def ask(**fields: Any) -> str:
            tokens = found.served.tokens(found.prompt, 300, **fields)
            assert tokens[-1] == EOS
            return bytes(tokens[:-1]).decode()

        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": OBJECT}}
        assert json.loads(ask(response_format=form)).keys() == {"name", "age"}
        assert re.fullmatch("a/b[0-9]{2,4}", ask(structured_outputs={"regex": "a/b[0-9]{2,4}"}))
        assert ask(guided_choice=["yes}", "no"], ignore_eos=True) in ("yes}", "no")
        assert re.fullmatch("(ab)+c", ask(guided_grammar='root ::= ("ab")+ "c"'))
        call = {"type": "function", "function": {"name": "weather"}}
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [TOOL], "max_tokens": 300}
        reply = found.served.http.post(
            "/v1/chat/completions", json={"model": found.served.model, "tool_choice": call, **body}
        )
        (called,) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(called["function"]["arguments"]).keys() == {"name", "age"}
        found.check()


@pytest.mark.parametrize("fields", [LETTERS, PENALTY], ids=["grammar", "penalty"])
@each_kind
def test_an_answer_with_a_state_is_drawn_again_by_who_goes_on(
    kind: str, fields: dict[str, Any], clusters: Clusters
) -> None:
    """A server knows the state of a grammar, and what penalties count, only of tokens that it drew."""
    with clusters.of(kind, "1P1D") as found:
        expected = found.served.tokens(found.prompt, 60, **fields)
        found.fault("decode-0", die=1)
        assert found.served.tokens(found.prompt, 60, **fields) == expected
        assert found.counts("decode-0")["died"] == 1
        found.check()


@pytest.mark.parametrize("fields", [LETTERS, PENALTY], ids=["grammar", "penalty"])
def test_an_answer_that_is_drawn_otherwise_fails(fields: dict[str, Any], clusters: Clusters) -> None:
    with clusters.of("pool", "1P1D") as found:
        found.fault("decode-0", die=1, drift=1)
        body = body_of(found, 60) | {"stream": False} | fields
        reply = found.served.http.post("/v1/completions", json=body)
        assert reply.status_code == 503 and "drew other tokens than those that were sent" in reply.text
        found.check()


@each_kind
def test_sigterm_lets_running_answers_finish(kind: str, clusters: Clusters) -> None:
    with clusters.of(kind, "1P1D") as found, ThreadPoolExecutor(1) as pool:
        found.fault("decode-0", token_s=0.01)
        answering = threading.Event()
        answer = pool.submit(streamed, found.served, found.prompt, 100, answering)
        answering.wait()
        found.served.process.send_signal(signal.SIGTERM)
        assert answer.result() == expected_tokens(found.prompt, 100)
        assert found.served.process.wait(timeout=90) == 0
        servers = [int(path.stem.split(".")[1]) for path in found.folder.glob("*.url")]
        assert len(servers) == 2
        found.served.wait_until(lambda: not any(map(alive, servers)), "no server outlives its adapter")


# More of them.


@each_kind
def test_answers_of_four_nodes_are_those_of_one_server(kind: str, clusters: Clusters) -> None:
    with clusters.of(kind, "2P2D") as found:
        check_answers(found)


@each_kind
def test_a_killed_server_costs_no_token_and_is_started_again(kind: str, clusters: Clusters) -> None:
    with clusters.of(kind, "2P2D") as found, ThreadPoolExecutor(6) as pool:
        served, prompts = found.served, found.prompts(6)
        for node in ("decode-0", "decode-1"):
            found.fault(node, token_s=0.01)
        answering = threading.Event()
        answers = [pool.submit(streamed, served, prompt, 100, answering) for prompt in prompts]
        answering.wait()
        old = found.url("decode-0")
        found.fault("decode-0", kill=1)
        assert [answer.result() for answer in answers] == [expected_tokens(each, 100) for each in prompts]
        served.wait_until(
            lambda: "decode-0" in served.gauge("kv_blocks") and found.known("decode-0") not in (None, old),
            "it is back",
        )
        assert served.tokens(found.prompt, 20) == expected_tokens(found.prompt, 20)
        found.check()


# Servers that somebody else started.

PROMPT = list(range(1, 93))


@contextlib.contextmanager
def running(
    home: Path, model: Path, *more: str, key: str = "", sockets: str = "", within: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """A server that somebody else started, and the settings of a deployment with a node for it. `sockets`: in place of
    its folder, without a pool; `within`: a command that runs it."""
    with reserved_port() as port:
        home.mkdir()
        vllm = {"attach": f"http://127.0.0.1:{port}", "sockets": sockets or str(home)}
        vllm["transfer"] = "nixl" if sockets else "pool"
        settings = {
            "model": str(model),
            "engine": {"kind": "vllm", "device": "cpu", "kv_memory": 1 << 23, "vllm": vllm},
            "cache": {} if sockets else {"dram": "16MiB"},
            "roles": SHAPES["mixed"],
        }
        arguments = arguments_of(
            load_config(None, settings), str(model), "float32", 0, port, ServerSockets(vllm["sockets"])
        )
        command = [*within, sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        command += ["--served-model-name", "theirs", "too", *more]
        with subprocess.Popen(command, env=os.environ | stand_in(home) | {"VLLM_API_KEY": key}) as process:
            try:
                yield settings
            finally:
                process.kill()


@pytest.mark.parametrize("size", [16, 64])
def test_a_server_that_runs_already_is_a_node(
    size: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its names and its blocks. It outlives its node, and the next one knows nothing wrong of what it has."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with running(tmp_path / "there", model, "--block-size", str(size), key="secret") as settings:
        known = (len(PROMPT) - 1) // size * size
        for expected in (0, known):
            with serve(tmp_path, settings) as served:
                answers = [served.complete(PROMPT, 20) for _ in range(2)]
                for answer in answers:
                    assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 20)
                assert [cached(answer) for answer in answers] == [expected, known]


@pytest.mark.parametrize(
    ("how", "why"), [("refused", "made to fail (HTTP 400)"), ("ignored", "start it without --reasoning-parser")]
)
def test_grammars_are_refused_where_the_server_follows_none(
    how: str, why: str, model: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "there", model, "--grammars", how) as settings, serve(tmp_path, settings) as served:
        body = {"model": served.model, "prompt": PROMPT, "max_tokens": 60} | LETTERS
        reply = served.http.post("/v1/completions", json=body)
        assert reply.status_code == 400 and why in reply.text
        assert served.tokens(PROMPT, 20) == expected_tokens(PROMPT, 20)


APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Runs a command that sees no process of others, nor they its own, as in a container."""


def test_a_pool_needs_one_folder_that_server_and_node_share(model: Path, tmp_path: Path) -> None:
    if subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("process namespaces cannot be made here")
    with (
        running(tmp_path / "there", model, "--block-size", "16", within=APART) as settings,
        serve(tmp_path, settings) as served,
    ):
        for prompt in ([7, *PROMPT], [8, *PROMPT]):
            assert served.tokens(prompt, 20) == expected_tokens(prompt, 20)
        served.wait_until(lambda: served.total("vllm_blocks_saved_total") >= 2 * BLOCKS, "blocks are saved")


def test_without_a_pool_nothing_but_the_network_is_shared(model: Path, tmp_path: Path) -> None:
    with two_ports() as port, running(tmp_path / "there", model, sockets=f"tcp://127.0.0.1:{port}") as settings:
        long = [*PROMPT, *PROMPT]
        with serve(tmp_path, settings) as served:
            answers = [served.complete(long, 20) for _ in range(2)]
            assert [answer["choices"][0]["token_ids"] for answer in answers] == 2 * [expected_tokens(long, 20)]
            assert [cached(answer) for answer in answers] == [0, 128]
            served.wait_until(lambda: served.total("kv_blocks_cached"), "its events are heard")


def test_a_folder_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    with running(tmp_path / "there", model) as settings:
        settings["engine"]["vllm"]["sockets"] = str(tmp_path / "nowhere")
        with (
            pytest.raises(AssertionError, match="there is no such folder; a server in another container"),
            serve(tmp_path, settings),
        ):
            pass


def test_a_server_with_blocks_of_another_size_than_was_asked_for_is_no_node(
    model: Path, tmp_path: Path
) -> None:
    with running(tmp_path / "there", model) as settings:
        settings["engine"]["block_size"] = 16
        with (
            pytest.raises(AssertionError, match=r"has blocks of 128 tokens, engine\.block_size is 16"),
            serve(tmp_path, settings),
        ):
            pass


def test_a_server_with_other_weights_is_no_node(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", "llama", seed=2)
    with running(tmp_path / "there", tmp_path / "other") as settings:
        settings["model"] = str(model)
        with (
            pytest.raises(
                AssertionError, match=f"serves {tmp_path}/other, this node {model}: give both one folder"
            ),
            serve(tmp_path, settings),
        ):
            pass
