"""Shares of equal answers, what transformers said once, and the texts that are asked."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agreement
from benchmarks.agreement import Answer, Plan, Reference, leading, share_of
from benchmarks.models import make_random_model
from benchmarks.peers.servers import Running
from benchmarks.texts import LONGEST, SHORTEST, library_texts, texts_of
from isthmus.bench import BenchError
from isthmus.core.errors import ConfigError


def test_leading_tokens() -> None:
    assert leading((1, 2, 3), (1, 2, 4)) == 2
    assert leading((1, 2), (1, 2, 3)) == 2
    assert leading((), (1,)) == 0


def test_a_share_counts_whole_answers() -> None:
    reference = [Answer((9,), (1, 2)), Answer((8,), (3, 4))]
    found = share_of("ours", 8, reference, [(1, 2), (3, 5)])
    assert (found.prompts, found.equal, found.leading) == (2, 1, 1.5)
    assert agreement.table(Plan(Path(), (), 2, Path()), [found]).row_count == 1


def test_transformers_answers_once(tmp_path: Path) -> None:
    make_random_model(
        tmp_path / "model", hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, dtype="bfloat16"
    )
    said: list[str] = []
    plan = Plan(tmp_path / "model", ("What?", "Who?", "What?"), 5, tmp_path)
    first = Reference(plan, said.append).answers()
    assert [len(answer.tokens) for answer in first] == [5, 5, 5]
    assert first[0] == first[2] != first[1]
    assert said == ["transformers: 2 prompts, 1 are known", "transformers: 2 of 2"]
    assert Reference(plan, said.append).answers() == first and len(said) == 2
    (tmp_path / "transformers-5.json").write_text("[1]")
    with pytest.raises(BenchError, match=r"transformers-5\.json: holds no answers"):
        Reference(plan, said.append)


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the prompt, as often as fits."""

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["temperature"], body["ignore_eos"], body["return_token_ids"]) == (0, True, True)
        tokens = (body["prompt"] * body["max_tokens"])[: body["max_tokens"]]
        tokens = tokens[:-1] if body["prompt"] == [0] else tokens
        content = json.dumps({"choices": [{"token_ids": tokens}]}).encode()
        self.send_response(500 if body["prompt"] == [5] else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""


@pytest.fixture
def echo() -> Iterator[Running]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Running(f"http://127.0.0.1:{server.server_port}", "echo", 0.0, 0)
        server.shutdown()
        thread.join()


def test_a_server_is_asked_for_tokens(echo: Running) -> None:
    reference = [Answer((number, 2), (number, 2, number)) for number in range(6)]
    assert asyncio.run(agreement.ask(echo, reference, 3, 2)) == [answer.tokens for answer in reference]
    with pytest.raises(BenchError, match="answered 2 tokens and not 3"):
        asyncio.run(agreement.ask(echo, [Answer((0,), ())], 3, 1))
    with pytest.raises(BenchError, match="answered 500: "):
        asyncio.run(agreement.ask(echo, [Answer((5,), ())], 3, 1))


def test_texts_of_the_library_are_many_and_differ() -> None:
    texts = library_texts()
    assert len(set(texts)) == len(texts) > 400
    assert all(SHORTEST <= len(text) <= LONGEST for text in texts)
    assert texts == library_texts() == texts_of(None)


def test_texts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text('plain words\n\n{"prompt": "of JSON"}\n')
    assert texts_of(file) == ["plain words", "of JSON"]
    for line in ('{"text": "x"}', '{"prompt": 1}', "{broken"):
        file.write_text(f"fine\n{line}\n")
        with pytest.raises(ConfigError, match='line 2: is no JSON with a "prompt" that is text'):
            texts_of(file)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        texts_of(tmp_path / "none")
