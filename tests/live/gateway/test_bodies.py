"""What bodies are: encodings of JSON, what is none, and how deep it nests."""

from __future__ import annotations

import gzip
import json
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import RequestError
from isthmus.live.gateway import GatewayTokenizer
from isthmus.live.gateway.bodies import parse_body
from isthmus.live.gateway.requests import CompletionRequest

from .fake import FakeBackend
from .inprocess import Poster

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


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
    ),
    st.booleans(),
)
def test_a_text_is_the_same_in_every_encoding(text: str, encoding: str, ascii: bool) -> None:
    body = json.dumps({"prompt": text}, ensure_ascii=ascii).encode(encoding)
    assert parse_body(CompletionRequest, body, 100).prompt == (text,)


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(CompletionRequest, body, 100)


@pytest.mark.parametrize(
    ("number", "is_kept"),
    [
        ("0.30000000000000004", True), ("0.10000000000000000000", True), ("1234567890.5", True),
        ("0.12345678901234567890", False), ("123456789012345678901234567890.5", False),
        ("1234567890123456789", True),
    ],
)  # fmt: skip
def test_a_schema_keeps_its_digits_or_is_refused(post: Poster, number: str, is_kept: bool) -> None:
    named = f'{{"name": "x", "schema": {{"const": {number}}}}}'
    form = f'{{"type": "json_schema", "json_schema": {named}}}'
    elsewhere = '"prompt": "0.12345678901234567890", "temperature": 0.69999999999999995559, "max_tokens": 1'
    response = post.request("POST", "/v1/completions", content=f'{{{elsewhere}, "response_format": {form}}}')
    assert (response.status_code == 200) == is_kept, response.text
    if not is_kept:
        error = response.json()["error"]
        assert error["param"] == "response_format" and number in error["message"]


def test_depth_takes_the_same_time_for_each_byte() -> None:
    """A text that is never closed was searched for its end from each of its quotes: 2 s for so small a body."""
    body = b"[" * 101 + b'"' + rb"\"" * 9900
    before_s = time.process_time()
    with pytest.raises(RequestError, match="deeper than 100"):
        parse_body(CompletionRequest, body, 100)
    assert time.process_time() - before_s < 0.2
