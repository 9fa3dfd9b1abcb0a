"""What a user and an operator see of `isthmus serve`: start, refusals to start, stop, disconnects, HTTPS."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from isthmus.cli.models import bytes_folder
from isthmus.config import Config
from isthmus.facts import places_of, shaped
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.certificates import make_certificate
from tests.cli.conftest import isthmus as isthmus
from tests.inside import Inside, inside
from tests.live.cluster.kit import RECIPE, emulated, pooled, written
from tests.models import make_model
from tests.served import LIMIT_S, POLL_S, alive, command, given_up, refused, serve, streamed


def test_the_default_model_answers_the_official_client(tmp_path: Path) -> None:
    """No --model, no nodes named: chat, streamed and not, gives the same words; the answer ends by itself."""
    with serve(tmp_path) as served:
        chosen, why = shaped(Config(), len(os.sched_getaffinity(0)))
        assert served.gauge("kv_blocks").keys() == {place.node for place in places_of(chosen)}
        assert f"{why}\n" in served.story()
        assert served.model == "SmolLM2-135M-Instruct"
        assert served.http.get("/health").status_code == 200
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            asked = {
                "model": served.model,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            }
            whole = client.chat.completions.create(**asked)
            stream = client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
        text = whole.choices[0].message.content
        assert "Paris" in text
        assert whole.choices[0].finish_reason == "stop"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )


def test_a_disconnect_frees_the_blocks_on_both_nodes() -> None:
    """The answer stands still after its first tokens, until the head knows that nobody listens."""
    with inside(emulated()) as lasting:
        check_disconnect(lasting)


def check_disconnect(lasting: Inside) -> None:
    steps = count()

    def wait(process: NodeProcess) -> None:
        if process.node.node == "decode-0" and next(steps) > 20:
            while lasting.head._streams:
                time.sleep(POLL_S)

    body = {"model": lasting.model, "prompt": [5] * 40, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    before = lasting.gauge("tokens_sampled_total")["decode-0"]
    with lasting.stepping(wait):
        with lasting.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            lasting.wait_until(lambda: lasting.gauge("node_requests_running")["decode-0"] == 1, "it is running")
        idle = {"prefill-0": 0.0, "decode-0": 0.0}
        lasting.wait_until(lambda: lasting.gauge("node_requests_running") == idle, "no request running")
    lasting.wait_until(lambda: lasting.gauge("kv_blocks_available") == lasting.gauge("kv_blocks"), "all blocks")
    sampled = lasting.gauge("tokens_sampled_total")["decode-0"] - before
    assert sampled < 3999, "the answer went on to its end"


def test_sigterm_lets_running_answers_finish(tmp_path: Path) -> None:
    with serve(tmp_path, emulated(limits={"drain_s": 90})) as served:
        children = list(served.children().values())
        with ThreadPoolExecutor(1) as pool:
            answering = threading.Event()
            answer = pool.submit(streamed, served, [1, 2, 3], 500, answering)
            answering.wait()
            served.process.send_signal(signal.SIGTERM)
            assert answer.result() == expected_tokens(RECIPE, [1, 2, 3], 500, stop_tokens=(257,))
        assert served.process.wait(timeout=90) == 0
        assert len(children) == 2
        assert not any(map(alive, children))


def test_children_leave_when_the_launcher_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(AssertionError), serve(tmp_path, emulated()) as served:
        children = list(served.children().values())
        served.process.kill()
        served.process.wait()
        served.wait_until(lambda: not any(map(alive, children)), "every child gone")
        log.write_text("gone")
    assert log.read_text() == "gone"


FLAGS_EMULATED = ("--engine", "emulated", "--hardware", "h200")


def prompts_of(count: int) -> list[list[int]]:
    """Some share a prefix."""
    draw = random.Random(count)
    shared = [draw.randrange(256) for _ in range(100)]
    return [
        shared[: draw.choice([0, 50, 100])] + [draw.randrange(256) for _ in range(draw.randrange(1, 300))]
        for _ in range(count)
    ]


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_every_answer_is_exact(tmp_path: Path) -> None:
    prompts = prompts_of(12)
    expected = [expected_tokens(RECIPE, prompt, 30) for prompt in prompts]
    arguments = ("--prefill", "2", "--decode", "2", "--token-budget", "64", "--host", "0.0.0.0")
    with serve(tmp_path, None, *FLAGS_EMULATED, *arguments) as served:
        assert "can use this server: there are no API keys" in served.story(), "it is open to others"
        assert not any(map(has_torch, [served.process.pid, *served.children().values()]))
        with ThreadPoolExecutor(12) as pool:
            for _ in range(2):  # then with cached prefixes
                found = pool.map(lambda prompt: served.tokens(prompt, 30, ignore_eos=True), prompts)
                assert list(found) == expected
        served.wait_until(lambda: sum(served.gauge("prefix_cache_hits_total").values()) > 0, "a prefix hit")
        salted = served.tokens(prompts[0], 30, ignore_eos=True, cache_salt="other")
        assert salted == expected_tokens(RECIPE, prompts[0], 30, salt="other") != expected[0]


def test_a_model_folder_with_a_config_alone_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    engine = {"kind": "emulated", "hardware": "h200", "gpus": 8, "kv_memory": "20GiB"}
    with inside({"model": str(folder), "engine": engine}) as served:
        assert served.model == "llama-70b"
        assert served.gauge("kv_blocks") == {"prefill-0": 4096.0, "decode-0": 4096.0}
        recipe = recipe_of(folder, bytes_folder(), 16)
        assert served.tokens([1, 2, 3], 5, ignore_eos=True) == expected_tokens(recipe, [1, 2, 3], 5)
        answer = served.complete([1, 2, 3], 2, ignore_eos=True, logprobs=1)["choices"][0]
        assert answer["logprobs"]["token_logprobs"] == [0.0, 0.0]
        slow = {"model": served.model, "prompt": [1] * 3000, "max_tokens": 2}
        reply = served.http.post("/v1/completions", json=slow, headers={"x-isthmus-slo-ttft-ms": "1"})
        assert reply.status_code == 200, "nothing refuses here"
        assert "isthmus_requests_within_slo_total 2.0" in served.http.get("/metrics").text


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


ON_H200: dict[str, Any] = {
    "engine": {"kind": "emulated", "hardware": "h200"},
    "roles": {"prefill": 1, "decode": 1},
}

SLOW_CURVE = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.05}
SLOW = ON_H200 | {"engine": {"kind": "emulated", "cost": SLOW_CURVE}}


def test_https_by_two_flags(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "https")
    certificate, key = files["certificate"], files["key"]
    arguments = ("--engine", "emulated", "--hardware", "h200", "--mixed", "1")

    def status(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("status", "--url", served.url, "--json"),
            capture_output=True,
            text=True,
            env=os.environ | environment,
            timeout=LIMIT_S,
            check=False,
        )

    with serve(tmp_path, None, *arguments, "--tls-certificate", certificate, "--tls-key", key) as served:
        assert served.url.startswith("https://127.0.0.1:")
        assert len(served.tokens([1, 2], 3)) == 3
        trusted = status({"SSL_CERT_FILE": files["authority"]})
        assert trusted.returncode == 0 and json.loads(trusted.stdout)["healthy"]
        [line] = status({}).stderr.splitlines()
        assert line.endswith("name the file of its certificate's authority in SSL_CERT_FILE")


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
def test_answers_that_outlast_the_server_end_in_their_own_form(tmp_path: Path, how: str) -> None:
    limits = {"drain_s": 0.5 if how == "the time is over" else 600}
    asked = {"prompt": [1], "max_tokens": 4000, "ignore_eos": True}
    begun = threading.Event()

    def stream() -> list[str]:
        body = {"model": served.model, **asked, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = []
            for line in reply.iter_lines():
                begun.set()
                lines.append(line)
        return [line for line in lines if line]

    with serve(tmp_path, SLOW | {"limits": limits}) as served, ThreadPoolExecutor(2) as pool:
        streaming = pool.submit(stream)
        plain = pool.submit(served.http.post, "/v1/completions", json={"model": served.model, **asked})
        assert begun.wait(LIMIT_S)
        served.wait_until_asked(2)
        children = list(served.children().values())
        served.process.send_signal(signal.SIGTERM)
        if how == "a second signal":
            until = time.monotonic() + LIMIT_S
            while "stopping: " not in served.story():
                assert time.monotonic() < until
                time.sleep(POLL_S)
            served.process.send_signal(signal.SIGTERM)
        *_, error, done = streaming.result(LIMIT_S)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"
        answer = plain.result(LIMIT_S)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "unavailable"
        assert served.process.wait(LIMIT_S) == 0
        assert "Traceback" not in served.story() and not [pid for pid in children if alive(pid)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refusals") / "tiny"
    make_model(folder, "llama")
    return folder


def links(**clusters: Any) -> dict[str, Any]:
    return emulated(clusters=clusters, links=[{"between": ["west", "east"], "gbps": 1, "rtt_ms": 10}])


P, PD = {"roles": {"prefill": 1}}, {"roles": {"prefill": 1, "decode": 1}}
SETTINGS: list[tuple[dict[str, Any], list[str]]] = [
    (emulated(roles={"prefill": {"count": 3, "pipeline": 2}, "decode": 1}), ["3 nodes make no groups of 2"]),
    (emulated(roles={"prefill": 1, "decode": {"count": 2, "pipeline": 2}}), ["roles.decode.pipeline"]),
    (pooled(tls={"certificate": "a.crt"}), ["tls", "authority"]),
    (links(east=PD, west={}, north=P), ["clusters.north: its prefill nodes need decode nodes there or in"]),
    (links(east=P, west=P), ["no request could be served"]),
    ({"engine": {"kind": "emulated", "cost": "nothing.yaml"}}, ["nothing.yaml: cannot be read"]),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS)
def test_a_file_that_makes_no_cluster(settings: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    code, line = refused("--config", written(tmp_path, settings), "--port", "0")
    assert code != 0 and all(word in line for word in words)


WRONG_FLAGS: list[tuple[list[str], list[str]]] = [
    (["--engine", "emulated"], ["engine.hardware", "h200"]),
    (["--engine", "emulated", "--hardware", "h20x"], ["h20x", "h200"]),
    (["--engine", "imagined"], ["engine.kind"]),
    (["--engine", "emulated", "--hardware", "h200", "--model", "BERT/.."], ["config.json"]),
    (["--model", "BERT"], ["BertForMaskedLM", "LlamaForCausalLM"]),
    (["--model", "/no/such/model"], ["no such folder"]),
    (["--model", "MODEL", "--kv-memory", "100000TiB"], ["are available"]),
    (["--model", "MODEL", "--kv-memory", "1KiB"], ["fewer than 2 blocks"]),
    (["--model", "MODEL", "--port", "TAKEN"], ["in use"]),
]


@pytest.mark.parametrize(("flags", "words"), WRONG_FLAGS)
def test_flags_that_make_no_cluster(flags: list[str], words: list[str], model: Path, tmp_path: Path) -> None:
    bert = tmp_path / "bert"
    bert.mkdir()
    (bert / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"MODEL": str(model), "BERT": str(bert), "BERT/..": str(tmp_path)}
        names["TAKEN"] = str(taken.getsockname()[1])
        port = [] if "--port" in flags else ["--port", "0"]
        code, line = refused(*[names.get(flag, flag) for flag in flags], *port)
    assert code != 0 and all(word in line for word in words)


def pickled(model: Path, tmp_path: Path) -> list[str]:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    return ["--model", str(tmp_path)]


@pytest.mark.parametrize("what", ["weights of pickle", "a disk without a folder"])
def test_what_no_node_can_start_with(what: str, model: Path, tmp_path: Path) -> None:
    arguments, word = {
        "weights of pickle": (pickled(model, tmp_path), "pytorch_model.bin"),
        "a disk without a folder": (
            ["--config", written(tmp_path, pooled(cache={"ssd": "1GiB"}))],
            "cache.folder",
        ),
    }[what]
    code, line = given_up(*arguments, "--port", "0")
    assert code != 0 and word in line
