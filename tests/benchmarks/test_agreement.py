"""Greedy tokens beside transformers: what is asked, kept and counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.agreement import Answer, Plan, Tokens, answers_of_transformers, ask, leading, share_of
from benchmarks.served import Running
from isthmus.bench import BenchError
from tests.benchmarks.conftest import Study


def test_a_share_counts_whole_answers() -> None:
    assert (leading((1, 2, 3), (1, 2, 4)), leading((1, 2), (1, 2, 3)), leading((), (1,))) == (2, 2, 0)
    reference = [Answer((9,), (1, 2)), Answer((8,), (3, 4))]
    assert share_of(reference, [(1, 2), (3, 5)]) == {"prompts": 2, "equal": 1, "leading": 1.5}


def test_ours_beside_transformers(tiny: Path, tmp_path: Path, study: Study) -> None:
    """A cluster as a user starts it."""
    rows, shown = study("agreement", "--model", tiny, "--folder", tmp_path, "--count", 2, "--tokens", 4)
    assert [(row["side"], row["concurrency"], row["prompts"]) for row in rows] == [
        ("isthmus", n, 2) for n in (1, 8)
    ]
    assert all(0 <= row["equal"] <= 2 and 0 <= row["leading"] <= 4 for row in rows)
    assert "4 greedy tokens" in shown


def test_transformers_answers_once(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    plan, texts = Plan(tiny, tmp_path, tokens=5), ["What?", "Who?", "What?"]
    first = answers_of_transformers(plan, texts, said.append)
    assert [len(answer.tokens) for answer in first] == [5, 5, 5]
    assert first[0] == first[2] != first[1]
    assert said == ["transformers: 2 prompts, 1 are known", "transformers: 2 of 2"]
    assert answers_of_transformers(plan, texts, said.append) == first and len(said) == 2
    (tmp_path / "transformers-6.json").write_text("[1]")
    with pytest.raises(BenchError, match=r"transformers-6\.json: holds no answers"):
        answers_of_transformers(replace(plan, tokens=6), texts, said.append)


async def echo(request: web.Request) -> web.Response:
    """Answers with the prompt, as often as fits."""
    body = await request.json()
    assert (body["temperature"], body["ignore_eos"], body["return_token_ids"]) == (0, True, True)
    if body["prompt"] == [5]:
        raise web.HTTPInternalServerError
    tokens = (body["prompt"] * body["max_tokens"])[: body["max_tokens"]]
    return web.json_response({"choices": [{"token_ids": tokens[:-1] if body["prompt"] == [0] else tokens}]})


def test_a_server_is_asked_for_tokens() -> None:
    async def asked(*reference: Answer) -> list[Tokens]:
        app = web.Application()
        app.router.add_post("/v1/completions", echo)
        async with TestServer(app) as server:
            running = Running(str(server.make_url("")).rstrip("/"), "echo", 0.0, 0)
            return await ask(running, reference, 3, 2)

    reference = [Answer((number, 2), (number, 2, number)) for number in range(6)]
    assert asyncio.run(asked(*reference)) == [answer.tokens for answer in reference]
    with pytest.raises(BenchError, match="answered 2 tokens and not 3"):
        asyncio.run(asked(Answer((0,), ())))
    with pytest.raises(BenchError, match="answered 500: "):
        asyncio.run(asked(Answer((5,), ())))
