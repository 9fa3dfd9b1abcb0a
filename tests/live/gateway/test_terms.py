"""Priority, limits and reuse of a request, from its headers to the jobs."""

from __future__ import annotations

import pytest

from isthmus.core.errors import RequestError
from isthmus.core.types import Reuse
from isthmus.live.gateway.headers import REUSE, Terms, terms_of

from .fake import FakeBackend
from .inprocess import Poster

NAMES = ("x-isthmus-slo-ttft-ms", "x-isthmus-slo-tbt-ms", "x-isthmus-priority")


def terms(*headers: tuple[bytes, bytes]) -> Terms:
    return terms_of({"type": "http", "headers": list(headers)})


def test_no_header_means_no_terms() -> None:
    assert terms((b"x-request-id", b"5")) == Terms()


def test_each_header_is_read() -> None:
    found = terms(
        *((name.encode(), value) for name, value in zip(NAMES, (b"300", b" 50 ", b"-2"), strict=True))
    )
    assert found == Terms(priority=-2, ttft_ms=300, tbt_ms=50)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in NAMES
        for value in (b"", b"soon", b"1.5", b"0x10", b"1e3", b"99999999999", b"\xff")
    ]
    + [(NAMES[0], b"0"), (NAMES[0], b"-1"), (NAMES[1], b"0"), (NAMES[2], b"1001"), (NAMES[2], b"-1001")],
)
def test_what_is_no_integer_in_range_is_refused_by_its_name(name: str, value: bytes) -> None:
    with pytest.raises(RequestError, match=f"the header '{name}' must be an integer from") as caught:
        terms((name.encode(), value))
    assert caught.value.param == name


@pytest.mark.parametrize(("name", "value"), [(NAMES[2], b"1"), (REUSE, b"exact")])
def test_a_header_given_twice_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(RequestError, match=f"'{name}' is given 2 times"):
        terms((name.encode(), value), (name.encode(), value))


@pytest.mark.parametrize("reuse", list(Reuse))
def test_what_may_be_reused_is_one_of_three_words(reuse: Reuse) -> None:
    assert terms((REUSE.encode(), f" {reuse} ".encode())) == Terms(reuse=reuse)


@pytest.mark.parametrize("value", [b"", b"Exact", b"semantics", b"chunks, exact", b"1", b"\xff\r", b"x" * 500])
def test_no_other_word_is(value: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        terms((REUSE.encode(), value))
    said = str(caught.value)
    assert said.startswith("the header 'x-isthmus-reuse' must be exact, chunks or semantic, got '")
    assert "\n" not in said and "\r" not in said and len(said) < 130
    assert caught.value.param == REUSE


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_terms_reach_every_job(post: Poster, backend: FakeBackend, path: str) -> None:
    body = {"model": "acme/tiny", "n": 2}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    values = {NAMES[0]: "300", NAMES[1]: "50", NAMES[2]: "7"}
    assert post.request("POST", path, json=body, headers=values).status_code == 200
    assert [(job.priority, job.ttft_ms, job.tbt_ms) for job in backend.jobs] == [(7, 300, 50)] * 2
    wrong = post.request("POST", path, json=body, headers={NAMES[2]: "high"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == NAMES[2]
    assert len(backend.jobs) == 2
