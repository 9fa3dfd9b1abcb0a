"""What strangers may send over a connection, and how every answer ends. All over real sockets."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest

from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.settings import GatewaySettings, HttpLimits
from isthmus.live.gateway.tenants import STALL_BYTES, STALL_S, Phase, Traffic

from .fake import HANG, FakeBackend, says
from .server import Answer, Front, fronted, get, post

KIB, MIB = 2**10, 2**20
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "acme/tiny", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "acme/tiny", "prompt": "hi"},
    RESPONSES: {"model": "acme/tiny", "input": "hi"},
}
PENDING = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\n"

Opener = Callable[..., AbstractContextManager[Front]]


@pytest.fixture
def opened(backend: FakeBackend, tokenizer: GatewayTokenizer) -> Opener:
    """Starts a server with these limits."""

    def start(*, drain_s: float = 60, max_body_bytes: int = 8 * MIB, **limits: Any) -> Any:
        http = HttpLimits(**{"header_s": LIMIT_S, "body_s": LIMIT_S} | limits)
        settings = GatewaySettings(http=http, max_body_bytes=max_body_bytes)
        return fronted(create_app(backend, tokenizer, settings), drain_s=drain_s)

    return start


@pytest.fixture
def front(opened: Opener) -> Iterator[Front]:
    with opened() as front:
        yield front


def check_refused(answer: Answer, status: int, words: str) -> None:
    assert answer.status == status and words in answer.error()
    assert answer.headers["connection"] == "close"


# Headers.


@pytest.mark.parametrize(
    "start",
    [
        b"GET /health HTTP/1.1\r\nx: ",  # a value
        b"GET /health HTTP/1.1\r\n",  # a name
        b"GET /",  # the URL
        PENDING + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ",  # behind the body
        PENDING + b"transfer-encoding: chunked\r\n\r\n2;",  # beside a chunk's length
    ],
)
def test_a_header_without_an_end_is_refused_at_its_limit(front: Front, start: bytes) -> None:
    """128 MiB of it, so that what is joined piece by piece would take a minute."""
    client = front.connect(start)
    for _ in range(128):
        client.send(b"a" * MIB)
    (answer,) = client.answers()
    check_refused(answer, 431, "the headers are over 65536 bytes")
    assert front.metric('http_refused_total{reason="header_bytes"}') == 1


def test_headers_just_within_their_limits_are_taken(front: Front) -> None:
    many = [f"x{number}: 1" for number in range(98)]  # host and connection come with them
    assert front.ask(get("/health", *many)).status == 200
    check_refused(front.ask(get("/health", "y: 1", *many)), 431, "more than 100 headers")
    size = len(get("/health", "x: "))
    assert front.ask(get("/health", "x: " + "a" * (64 * KIB - size))).status == 200
    check_refused(front.ask(get("/health", "x: " + "a" * (64 * KIB - size + 1))), 431, "over 65536 bytes")


def test_requests_on_a_kept_connection_have_their_headers_counted_anew(opened: Opener) -> None:
    with opened(header_bytes=4 * KIB) as front:
        request = get("/health", "x: " + "a" * 3 * KIB, close=False)
        client = front.connect()
        for _ in range(5):
            client.send(request)
            client.read_until(b"\r\n\r\n")
        client.send(get("/health"))
        assert [answer.status for answer in client.answers()] == [200]


def test_a_large_body_is_no_header(front: Front, backend: FakeBackend) -> None:
    body = json.dumps(FIELDS[COMPLETIONS]).encode() + b" " * 3 * MIB
    cut = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
    parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in cut]
    assert front.ask(post(COMPLETIONS, body)).status == 200
    head = PENDING + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert front.ask(head, *parts, b"0\r\nx-checksum: 1\r\n\r\n").status == 200


# Time. The clock stands but for what a test says.

LIMIT_S = 1000


@pytest.fixture
def timed(opened: Opener) -> Iterator[Front]:
    with opened(header_s=LIMIT_S, body_s=LIMIT_S) as front:
        yield front


@pytest.mark.parametrize("start", [b"", b"G", b"GET /health HTTP/1.1\r\nx: "])
def test_headers_that_are_not_whole_in_time_are_given_up(timed: Front, start: bytes) -> None:
    client = timed.connect(start)
    timed.wait_for(Phase.HEADERS)
    timed.later(LIMIT_S - 1)
    timed.wait_for(Phase.HEADERS)
    timed.later(2)
    (answer,) = client.answers()
    check_refused(answer, 408, "the headers took longer than 1000 s")
    assert timed.metric('http_refused_total{reason="header_s"}') == 1


def test_a_body_that_is_not_whole_in_time_is_given_up(timed: Front) -> None:
    client = timed.connect(PENDING + b"content-length: 10\r\n\r\n{")
    timed.wait_for(Phase.BODY)
    timed.later(LIMIT_S - 1)
    timed.wait_for(Phase.BODY)
    timed.later(2)
    (answer,) = client.answers()
    check_refused(answer, 408, "the body took longer than 1000 s")
    assert answer.headers["x-request-id"]
    assert timed.metric('requests_failed_total{status="408"}') == 1


@pytest.mark.parametrize(
    ("start", "phase"),
    [(b"GET /health HTTP/1.1\r\nx: ", Phase.HEADERS), (PENDING + b"content-length: 9\r\n\r\n{", Phase.BODY)],
)
def test_a_byte_now_and_then_extends_nothing(timed: Front, start: bytes, phase: Phase) -> None:
    client = timed.connect(start)
    timed.wait_for(phase)
    [connection] = timed.app.state.traffic.connections()
    timed.later(LIMIT_S - 1)
    before = connection._unseen, connection.body_bytes
    client.send(b"a")
    timed.wait_until(lambda: (connection._unseen, connection.body_bytes) != before)
    timed.later(2)
    (answer,) = client.answers()
    assert answer.status == 408


def test_an_answer_may_take_any_time_and_a_kept_connection_be_idle(timed: Front, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    streaming = timed.connect(post(COMPLETIONS, FIELDS[COMPLETIONS] | {"stream": True}))
    streaming.read_until(b"data: ")
    timed.later(10 * LIMIT_S)
    idle = timed.connect(get("/health", close=False))
    idle.read_until(b"\r\n\r\n")
    timed.later(59)
    idle.send(get("/health", close=False))
    assert b"200 OK" in idle.read_until(b"\r\n\r\n")
    timed.wait_for(Phase.IDLE)
    timed.wait_for(Phase.ANSWER)
    timed.later(61)
    assert idle.read() == b""
    streaming.socket.close()
    backend.wait_cancelled(1)


def test_a_client_that_sends_on_after_its_last_answer_is_cut_off(opened: Opener) -> None:
    with opened(max_body_bytes=MIB) as front:
        client = front.connect(PENDING + b"content-length: 2000000\r\n\r\n")
        front.wait_for(Phase.LINGER)
        front.later(3)
        front.wait_for(Phase.LINGER, 0)
        client.socket.close()


# What is no HTTP.


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",  # TLS
        b"GET /health HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET /h\xff HTTP/1.1\r\n\r\n",
        PENDING + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        PENDING + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_400_without_a_word_in_the_log(
    front: Front, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check_refused(front.ask(said), 400, "this is not HTTP: ")
        assert front.metric('http_refused_total{reason="malformed"}') == 1
    assert not caplog.records


def test_what_follows_an_answer_under_way_does_not_break_it(front: Front, backend: FakeBackend) -> None:
    (answer,) = front.connect(post(COMPLETIONS, FIELDS[COMPLETIONS], close=False) + b"\x00\x00\r\n").answers()
    assert answer.status == 200 and json.loads(answer.body)["choices"]


OFFERS = ("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: AAMAAABk")


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_client_that_would_rather_speak_http_2_is_served(
    front: Front, backend: FakeBackend, chunked: bool, at_once: bool
) -> None:
    """Java's client offers it with each first request, as curl's --http2 does. The connection goes on."""
    body = json.dumps(FIELDS[COMPLETIONS]).encode()
    head, framed = post(COMPLETIONS, body, *OFFERS, close=False)[: -len(body)], body
    if chunked:
        head = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        framed = b"%x\r\n%s\r\n0\r\nx-checksum: 1\r\n\r\n" % (len(body), body)
    said = [head, framed, get("/ping", *OFFERS, close=False), get("/v1/models")]
    client = front.connect(*[b"".join(said)] if at_once else said[:1])
    if not at_once:
        front.wait_for(Phase.BODY)
        client.send(*said[1:])
    answers = client.answers()
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert json.loads(answers[0].body)["choices"] and json.loads(answers[2].body)["data"]
    assert [job.tokens for job in backend.jobs]


def test_an_offered_protocol_is_not_spoken(front: Front) -> None:
    request = get("/health", "upgrade: websocket", "connection: upgrade", close=False)
    assert front.ask(request + b"\x81\x85frame").status == 200


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity"])
def test_a_transfer_coding_that_is_not_undone_is_said(front: Front, coding: str) -> None:
    answer = front.ask(PENDING + f"transfer-encoding: {coding}\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode())
    check_refused(answer, 501, "of transfer codings only 'chunked' is known")


def test_requests_wait_for_the_answers_before_theirs_but_not_any_number(front: Front) -> None:
    requests = [post(COMPLETIONS, FIELDS[COMPLETIONS], close=False), get("/ping", close=False)]
    answers = front.connect(*requests, get("/v1/models")).answers()
    assert [answer.status for answer in answers] == [200, 200, 200]
    assert json.loads(answers[0].body)["choices"] and json.loads(answers[2].body)["data"]
    answers = front.connect(b"".join([get("/health", close=False)] * 1000)).answers()
    assert [answer.status for answer in answers] == [200] * 17
    assert front.metric('http_refused_total{reason="pipelined"}') == 1


@pytest.mark.parametrize("kept", [[], ["connection: keep-alive"]])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_http_1_0_gets_no_chunks(front: Front, path: str, kept: list[str]) -> None:
    """RFC 9112, 6.1: the end of the connection ends the answer."""
    fields = FIELDS[path] | {"stream": True}
    answer = front.ask(post(path, fields, *kept, version="1.0", close=False))
    assert answer.status == 200 and answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers and "content-length" not in answer.headers
    *events, last = answer.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    assert all(json.loads(event.rpartition("data: ")[2]) for event in events) and events and not last
    whole = front.ask(get("/health", *kept, version="1.0", close=False))
    assert (whole.headers["content-length"], whole.headers["connection"]) == ("0", "close")


def test_http_1_0_is_not_told_to_go_on(front: Front) -> None:
    """RFC 9110, 10.1.1. Nor need it say whose server it asks."""
    for version, interim in (("1.1", [100]), ("1.0", [])):
        asked = post(COMPLETIONS, FIELDS[COMPLETIONS], "expect: 100-continue", version=version)
        client = front.connect(asked.replace(b"host: test\r\n", b""))
        assert [answer.status for answer in client.answers()] == [*interim, 200]


# Bodies.


def test_the_rest_of_a_body_that_is_refused_does_not_cost_the_answer(opened: Opener) -> None:
    with opened(max_body_bytes=MIB) as front:
        front.later(0)  # from where on the clock stands
        client = front.connect(PENDING + b"content-length: %d\r\n\r\n" % (64 * MIB))
        for _ in range(64):
            client.socket.sendall(b"a" * MIB)
        (answer,) = client.answers()
        check_refused(answer, 413, "larger than 1048576 bytes")


def test_of_too_many_large_bodies_the_oldest_ends(opened: Opener) -> None:
    with opened(bodies=2 * MIB) as front:
        first, small, *others = (front.connect() for _ in range(4))
        sent = 0
        for client, size in ((first, 900 * KIB), (small, 60 * KIB), (others[0], 900 * KIB)):
            client.send(PENDING + b"content-length: 1000000\r\n\r\n" + b"a" * size)
            sent += size
            wait_for_bytes(front, sent)
        others[1].send(PENDING + b"content-length: 1000000\r\n\r\n" + b"a" * 900 * KIB)
        (answer,) = first.answers()
        check_refused(answer, 503, "too many large request bodies are under way (limits.bodies)")
        assert answer.headers["retry-after"] == "1"
        assert front.metric('http_refused_total{reason="bodies"}') == 1
        for client in (small, *others):
            client.socket.close()


def wait_for_bytes(front: Front, at_least: int) -> None:
    front.wait_until(lambda: front.app.state.traffic.body_bytes >= at_least)


# Connections.


def test_whoever_serves_nothing_makes_room(opened: Opener, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    with opened(connections=4) as front:
        streaming = front.connect(post(COMPLETIONS, FIELDS[COMPLETIONS] | {"stream": True}))
        streaming.read_until(b"data: ")
        idle = front.connect(get("/health", close=False))
        idle.read_until(b"\r\n\r\n")
        halves = [front.connect(b"GET /health HTTP/1.1\r\nx: ") for _ in range(30)]
        assert front.ask(get("/health")).status == 200
        assert front.metric('http_refused_total{reason="connections"}') >= 28
        assert front.metric("http_connections") <= 4
        assert idle.is_cut_off()  # it had waited for longest
        for client in halves:
            client.socket.close()
        streaming.socket.close()
        backend.wait_cancelled(1)


def test_when_all_are_answered_a_new_one_is_told_to_come_back(opened: Opener, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    with opened(connections=2) as front:
        streaming = [front.connect(post(COMPLETIONS, FIELDS[COMPLETIONS] | {"stream": True})) for _ in range(2)]
        for client in streaming:
            client.read_until(b"data: ")
        answer = front.ask(get("/health"))
        check_refused(answer, 503, "every connection is being answered (limits.connections)")
        assert answer.headers["retry-after"] == "1"
        for client in streaming:
            client.socket.close()
        backend.wait_cancelled(2)
        front.wait_until(lambda: front.app.state.traffic.num_connections == 0)


# Ends.

STOPPING = "the server is stopping; send the request again"


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
@pytest.mark.parametrize("path", FIELDS)
def test_a_stream_that_outlasts_the_server_ends_in_its_own_form(
    opened: Opener, backend: FakeBackend, path: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: [*says([97], finish=None), HANG]
    with opened(drain_s=0.1 if how == "the time is over" else 60) as front:
        client = front.connect(post(path, FIELDS[path] | {"stream": True}, close=False))
        begun = client.read_until(b"data: ")
        front.stop()
        if how == "a second signal":
            front.end_now()
        answer = Answers(begun + client.read())
    *_, last, rest = answer.text.split("\n\n")
    assert rest == ""
    if path == RESPONSES:
        kind, data = last.split("\n")
        failed = json.loads(data.removeprefix("data: "))
        assert kind == "event: response.failed" and failed["response"]["error"]["message"] == STOPPING
    else:
        assert last == "data: [DONE]"
        event = answer.text.split("\n\n")[-3]
        assert json.loads(event.removeprefix("data: "))["error"]["message"] == STOPPING
    assert not caplog.records


class Answers:
    """The text of one chunked answer, which must be whole."""

    def __init__(self, read: bytes) -> None:
        assert read.endswith(b"\r\n0\r\n\r\n"), read[-100:]
        body, self.text = read.split(b"\r\n\r\n", 1)[1], ""
        while body:
            size, body = body.split(b"\r\n", 1)
            self.text, body = self.text + body[: int(size, 16)].decode(), body[int(size, 16) + 2 :]


@pytest.mark.parametrize("path", FIELDS)
def test_a_plain_answer_that_outlasts_the_server_is_503(
    opened: Opener, backend: FakeBackend, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = lambda _: [HANG]
    with opened(drain_s=0.1) as front:
        client = front.connect(post(path, FIELDS[path], close=False))
        half = front.connect(PENDING + b"content-length: 10\r\n\r\n{")
        backend.wait_asked(1)
        wait_for_bytes(front, 1)
        front.stop()
        for asked in (client, half):
            (answer,) = asked.answers()
            check_refused(answer, 503, STOPPING)
            assert answer.headers["retry-after"] == "1"
    assert len(backend.cancelled) == 1 and not caplog.records


def test_a_client_that_does_not_read_does_not_keep_the_server(opened: Opener, backend: FakeBackend) -> None:
    backend.script = lambda _: [*says([97] * 200, finish=None, per_batch=1), HANG] * 200
    with opened(drain_s=0.1) as front:
        client = front.connect(post(CHAT, FIELDS[CHAT] | {"stream": True, "n": 8}, close=False))
        client.read_until(b"data: ")
        front.stop()
    client.socket.close()


def test_a_stream_that_is_not_read_does_not_keep_its_place(timed: Front, backend: FakeBackend) -> None:
    """A hundred of them would leave no connection to anybody else, for ever."""
    backend.script = lambda _: [*says([97] * 1000, finish=None, per_batch=1), HANG]
    client = timed.connect()
    timed.wait_for(Phase.HEADERS)
    [connection] = timed.app.state.traffic.connections()
    accepted = connection.transport.get_extra_info("socket")
    timed.call(lambda: accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB))
    client.send(post(CHAT, FIELDS[CHAT] | {"stream": True, "n": 8}, close=False))
    timed.wait_until(lambda: connection.flow.write_paused)
    timed.later(STALL_S - 1)
    assert timed.app.state.traffic.connections() == [connection]
    timed.later(2)
    timed.wait_until(lambda: not timed.app.state.traffic.num_connections)
    client.socket.close()
    assert timed.metric('http_refused_total{reason="unread"}') == 1
    timed.wait_until(lambda: len(backend.cancelled) == 8)


def test_a_whole_answer_is_under_way_until_it_is_taken(timed: Front, backend: FakeBackend) -> None:
    """One that is written and not yet read is no idle connection, which would be the first to make room."""
    backend.script = lambda _: says([97] * 200)
    client = timed.connect()
    timed.wait_for(Phase.HEADERS)
    [connection] = timed.app.state.traffic.connections()
    accepted = connection.transport.get_extra_info("socket")
    timed.call(lambda: accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * KIB))
    client.send(post("/tokenize", {"prompt": "x" * 300_000, "return_token_strs": True}, close=False))
    timed.wait_until(lambda: connection.flow.write_paused)
    timed.wait_until(lambda: connection.cycle.response_complete)
    assert connection.phase is Phase.ANSWER
    assert len(client.read_until(b'"]}')) > 1_000_000
    timed.wait_until(lambda: connection.phase is Phase.IDLE)
    client.socket.close()


class Slow:
    """A connection whose client takes something now and then."""

    phase, body_bytes, unsent_bytes, aborted = Phase.ANSWER, 0, 4 * STALL_BYTES, False

    def abort(self) -> None:
        self.aborted = True


def test_who_reads_slowly_is_waited_for() -> None:
    now = [0.0]
    traffic, slow = Traffic(HttpLimits(), lambda: now[0]), cast(Any, Slow())
    traffic.enter(slow, Phase.ANSWER)
    traffic.stall(slow)
    for left in (3, 2, 1, 1):
        assert not slow.aborted
        now[0] += STALL_S
        slow.unsent_bytes = left * STALL_BYTES
        traffic.sweep()
    assert slow.aborted
    slow.aborted = False
    traffic.flow(slow)
    now[0] += STALL_S
    traffic.sweep()
    assert not slow.aborted, "it is through"


def test_answers_that_end_in_time_are_whole(opened: Opener, backend: FakeBackend) -> None:
    with opened() as front:
        clients = [front.connect(post(path, FIELDS[path], close=False)) for path in FIELDS]
        idle = front.connect(get("/health", close=False))
        idle.read_until(b"\r\n\r\n")
        backend.wait_asked(3)
        front.stop()
        assert [answer.status for client in clients for answer in client.answers()] == [200] * 3
        assert idle.read() == b""
