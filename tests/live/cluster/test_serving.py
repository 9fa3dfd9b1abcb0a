"""What a user and an operator see of `isthmus serve`: start, stop, disconnects, dead nodes, recordings."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import openai
import pytest

from isthmus.config import Config
from isthmus.facts import places_of, shaped
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.engine.emulated import expected_tokens
from tests.cli.conftest import Command
from tests.cli.conftest import isthmus as isthmus
from tests.inside import Inside, inside
from tests.live.cluster.kit import RECIPE, emulated
from tests.models import make_model
from tests.served import POLL_S, alive, serve, streamed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "tiny"
    make_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def lasting(model: Path) -> Iterator[Inside]:
    """A cluster for tests that leave it as it was, but for cached blocks."""
    with inside({"model": str(model), "cache": {"dram": "64MiB"}}) as served:
        yield served


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


def test_a_prefix_is_computed_once(lasting: Inside) -> None:
    """`cached_tokens` counts whole blocks shared with an earlier prompt, and another salt shares none."""
    shared = list(range(100))

    def cached(prompt: list[int], **fields: str) -> int:
        lasting.check_idle()
        return lasting.complete(prompt, 4, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached([*shared, 1, 2, 3]) == 0
    assert cached([*shared, 7, 8, 9]) == 96
    assert cached([*shared, 7, 8, 9], cache_salt="another tenant") == 0
    lasting.wait_until(lambda: lasting.gauge("prefix_cache_hits_total")["prefill-0"] == 96, "the hit counter")


def test_a_disconnect_frees_the_blocks_on_both_nodes(lasting: Inside) -> None:
    """The answer stands still after its first tokens, until the head knows that nobody listens."""
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


def test_a_recording_replays_with_identical_decisions(tmp_path: Path, isthmus: Command) -> None:
    recording = tmp_path / "flight.jsonl"
    settings = emulated(record=str(recording), roles={"prefill": 2, "decode": 1})
    with inside(settings) as served, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: served.tokens([n] * 50, 20), range(12)))
    status, out, err = isthmus("replay", str(recording))
    assert status == 0 and "identical decisions" in out, out + err
    lines = recording.read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if '"prefill":"prefill-' in line)
    other = 1 - int('"prefill":"prefill-1"' in lines[at])
    lines[at] = lines[at].replace(f'"prefill":"prefill-{1 - other}"', f'"prefill":"prefill-{other}"')
    recording.write_text("\n".join(lines))
    status, out, _ = isthmus("replay", str(recording))
    assert status == 1 and f"line {at + 1} differs" in out


def test_no_node_means_503_and_health_says_so() -> None:
    with inside(emulated(limits={"rejoin_s": 0.1})) as served:
        assert served.http.get("/health").status_code == 200
        served.kill("decode-0")
        served.wait_until(lambda: served.http.get("/health").status_code == 503, "unhealthy")
        asked = {"model": served.model, "prompt": [1], "max_tokens": 2}
        assert served.http.post("/v1/completions", json=asked).status_code == 503
