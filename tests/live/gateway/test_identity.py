from __future__ import annotations

import re

import pytest

from .inprocess import Poster


def echoed(post: Poster, sent: str, path: str = "/health") -> str:
    return post.request("GET", path, headers={"X-Request-Id": sent}).headers["x-request-id"]


@pytest.mark.parametrize("sent", ["a", "job-7_b.C", "x" * 128])
def test_the_client_s_id_comes_back(post: Poster, sent: str) -> None:
    assert echoed(post, sent) == sent
    assert echoed(post, sent, "/no/such/route") == sent


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "a\tb", "{}"])
def test_unfair_ids_are_replaced(post: Poster, sent: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", echoed(post, sent))


def test_without_one_it_is_the_answer_s(post: Poster) -> None:
    response = post.chat()
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


def test_the_cluster_s_names_stay_unique_when_a_client_s_id_comes_twice(post: Poster) -> None:
    headers = {"X-Request-Id": "again"}
    body = {"model": "acme/tiny", "prompt": "hi"}
    answers = [post.request("POST", "/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["again", "again"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
