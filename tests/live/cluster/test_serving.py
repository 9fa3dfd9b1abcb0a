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
from tests.cli.conftest import isthmus as isthmus
from tests.inside import Inside, inside
from tests.live.cluster.kit import RECIPE, emulated
from tests.served import POLL_S, alive, serve, streamed


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


@pytest.fixture
def lasting() -> Iterator[Inside]:
    with inside(emulated()) as served:
        yield served


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
