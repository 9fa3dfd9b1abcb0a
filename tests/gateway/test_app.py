from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from isthmus.gateway import GatewaySettings, GatewayTokenizer, create_app
from isthmus.gateway.http import read_body
from isthmus.gateway.problems import BodyTooLargeError

from .fake import FakeBackend
from .inprocess import Poster

MODEL = {
    "id": "acme/tiny",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "isthmus",
    "max_model_len": 256,
    "root": "acme/tiny",
    "parent": None,
}


def test_models(post: Poster) -> None:
    assert post.get("/v1/models").json() == {"object": "list", "data": [MODEL]}
    assert post.get("/v1/models/acme/tiny").json() == MODEL


def test_another_model(post: Poster) -> None:
    response = post.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_health(post: Poster, backend: FakeBackend) -> None:
    response = post.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    backend.healthy = False
    response = post.get("/health")
    assert (response.status_code, response.content) == (503, b"")
    assert response.headers["retry-after"] == "1"


def test_unknown_routes(post: Poster) -> None:
    response = post.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "no such route: /v2/nothing",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/health"), ("PUT", "/metrics")]
)
def test_wrong_methods(post: Poster, method: str, path: str) -> None:
    response = post.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["message"] == f"{method} is not allowed on {path}"
    assert ("POST" if method == "GET" else "GET") in response.headers["allow"]


def test_bodies_that_are_no_json(post: Poster) -> None:
    response = post.request("POST", "/v1/completions", content=b"{")
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the body is not valid JSON")


PROMPT = '{"prompt": "naïve €😀"}'


@pytest.mark.parametrize(
    "body",
    [
        PROMPT.encode("utf-8-sig"),
        PROMPT.encode("utf-16"),
        PROMPT.encode("utf-16-le"),
        PROMPT.encode("utf-16-be"),
        PROMPT.encode("utf-32"),
        PROMPT.encode("utf-32-be"),
        PROMPT.encode() + b"\0\0",
        b"\r\n " + PROMPT.encode() + b"\n",
    ],
)
def test_json_is_read_however_it_is_written(
    post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer, body: bytes
) -> None:
    """PowerShell writes UTF-16, Notepad a BOM, C a zero; `curl -d` calls it a form."""
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Content-Encoding": "utf-8"}
    answer = post.request("POST", "/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert tokenizer.decode(backend.jobs[0].tokens) == "naïve €😀"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"prompt=hi&model=m", "it looks like an HTML form; send JSON"),
        (b'--a1\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhi', "it looks like an HTML form"),
        (b"{'prompt': 'hi', 'stream': True}", "texts are in double quotes"),
        (b'{prompt: "hi"}', "names are in double quotes, too"),
        ('{"prompt": "é"}'.encode("latin-1"), "byte 12 (0xe9) is no UTF-8"),
        (
            PROMPT.encode("utf-16-le")[:-1],
            "the body begins as UTF-16-LE and is none at byte 44; send JSON in UTF-8",
        ),
    ],
)
def test_what_is_no_json_is_told_what_it_looks_like(post: Poster, body: bytes, words: str) -> None:
    answer = post.request("POST", "/v1/completions", content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "coding", "named"),
    [
        (gzip.compress(PROMPT.encode(), mtime=0), "", "gzip"),
        (zlib.compress(PROMPT.encode()), "", "deflate"),
        (b"\x28\xb5\x2f\xfd", "", "zstd"),
        (gzip.compress(PROMPT.encode(), mtime=0), "GZIP", "gzip"),
        (b"\x0b\x02\x80{}\x03", "br", "br"),
        (gzip.compress(gzip.compress(PROMPT.encode(), mtime=0), mtime=0), "identity, x-gzip", "gzip"),
    ],
)
def test_a_compressed_body_is_told_so(post: Poster, body: bytes, coding: str, named: str) -> None:
    answer = post.request("POST", "/v1/completions", content=body, headers={"Content-Encoding": coding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    told = f"the body is compressed ({named}), which this server does not undo: send it as it is"
    assert answer.json()["error"]["message"] == told


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(backend: FakeBackend, tokenizer: GatewayTokenizer, chunked: bool) -> None:
    async def chunks():  # type: ignore[no-untyped-def]
        for _ in range(3):
            yield b"x" * 500

    post = Poster(create_app(backend, tokenizer, GatewaySettings(max_body_bytes=1000)))
    content = chunks() if chunked else b"x" * 1500
    response = post.request("POST", "/v1/completions", content=content)
    assert response.status_code == 413
    assert "larger than 1000 bytes" in response.json()["error"]["message"]


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def never() -> dict[str, object]:
        raise AssertionError("it was read")

    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_body({"headers": [(b"content-length", b"1001")]}, never, 1000))


def test_the_default_limit_is_8_mib(post: Poster) -> None:
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20)).status_code == 400
    assert post.request("POST", "/v1/completions", content=b" " * (8 * 2**20 + 1)).status_code == 413


def test_two_apps_do_not_share_metrics(post: Poster, backend: FakeBackend, tokenizer: GatewayTokenizer) -> None:
    post.chat()
    assert "isthmus_generation_tokens_total 6.0" in post.get("/metrics").text
    other = Poster(create_app(backend, tokenizer))
    assert "isthmus_generation_tokens_total 0.0" in other.get("/metrics").text
