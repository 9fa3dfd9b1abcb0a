"""What strangers send, each kind small enough to be built here."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from isthmus.live.messenger.frames import FrameKind, prefix_of
from isthmus.live.messenger.ports import Terms
from isthmus.live.peers.messages import Heartbeat
from tests.hostile.victim import MODEL, Outcome, Victim

LEAST = -(2**63)
HEAR_S = 30.0
"""So long at most somebody waits to be turned away."""
ANSWERED = {"200", "400", "413", "422"}
TURNED_AWAY = {"closed", "400", "408", "413", "429", "431", "503"}

# Bodies of requests.


def grammars(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A request for each way in which a schema comes, and its path."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    object_of = {"type": "object", "properties": {"a": schema}}
    tool, other = (
        {"type": "function", "function": {"name": "f", "parameters": each}} for each in (schema, object_of)
    )
    named = {"type": "function", "function": {"name": "f"}}
    few = {"model": MODEL, "max_tokens": 4}
    chat = few | {"messages": [{"role": "user", "content": "x"}]}
    return [
        ("/v1/chat/completions", chat | {"response_format": form}),
        ("/v1/completions", few | {"prompt": "x", "guided_json": schema}),
        ("/v1/completions", few | {"prompt": "x", "guided_grammar": f"start: %json {json.dumps(schema)}"}),
        ("/v1/responses", {"model": MODEL, "input": "x", "max_output_tokens": 16, "text": text}),
        ("/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}),
        ("/v1/chat/completions", chat | {"tools": [other], "tool_choice": named}),
    ]


def doubling(levels: int, num_bytes: int) -> dict[str, Any]:
    """A schema of which each level of `anyOf` names the next one twice, with so many bytes of names."""
    width = num_bytes // levels
    defs: dict[str, Any] = {"d0": {"type": "integer"}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/d{level - 1}"}
        named = {"type": "object", "properties": {"x" * width + str(level): below}}
        defs[f"d{level}"] = {"anyOf": [below, named, below]}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels}"}


def nested(levels: int, num_bytes: int) -> dict[str, Any]:
    """The same without names: written out, a leaf of `num_bytes / 2 ** levels` bytes."""
    schema: dict[str, Any] = {"const": "x" * (num_bytes >> levels)}
    for _ in range(levels):
        schema = {"anyOf": [schema, schema]}
    return schema


def optional_integers(count: int, seed: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{seed}_{at}": {"type": "integer"} for at in range(count)}}


DEEP = "stands for a schema that is too deep to be encoded here"


def encoded(body: dict[str, Any]) -> bytes:
    deep = '{"type": "array", "items": ' * 20_000 + "{}" + "}" * 20_000
    return json.dumps(body).replace(f'"{DEEP}"', deep).encode()


def bombs() -> list[dict[str, Any]]:
    """Short descriptions of large machines."""
    rules = [f"r{at} r{at}" for at in range(3000)], [f"r{at}: r{at + 1} r{at + 1}" for at in range(3000)]
    return [
        {"guided_regex": "((a{0,500}){0,500}){0,500}"},
        {"guided_regex": "[ab]*a[ab]{400}"},
        {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
        {"guided_choice": [f"{at:032}" for at in range(50_000)]},
        {"guided_grammar": "start: " + " | ".join(rules[0]) + "\n" + "\n".join(rules[1]) + '\nr3000: "a"'},
        {"guided_grammar": 'start: start start | start "a" | "a"'},
        {"guided_json": DEEP},
        {
            "guided_json": {
                "type": "object",
                "patternProperties": {f"^{'a?' * 30}{at}$": {} for at in range(200)},
            }
        },
        {"guided_json": {"type": "string", "minLength": 10**6, "maxLength": 2**31}},
        {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
        {"guided_json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$" * 50}},
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}}},
    ]


# Connections.


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=HEAR_S) as opened:
        yield opened


def heard(opened: socket.socket, limit_s: float = HEAR_S) -> str:
    """The status that comes, "closed" where the connection ends without one, or "open" after so long."""
    opened.settimeout(limit_s)
    said = b""
    try:
        while b"\r\n" not in said and (more := opened.recv(4096)):
            said += more
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return said.split(b" ")[1].decode() if said.startswith(b"HTTP/") else "closed"


def send_on(opened: socket.socket, piece: bytes, count: int) -> bool:
    """False: nobody takes it any more."""
    try:
        for _ in range(count):
            opened.sendall(piece)
    except OSError:
        return False
    return True


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = [
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX",
    b"GET /health?",
    b"",
    CHUNKED + b"1;x=",
    CHUNKED + b"1\r\n{\r\n0\r\nX: ",
]
"""Beginnings of what has no end: a header's value and name, a target, a method, a chunk's extension, a trailer."""
"""Beginnings of what has no end."""


def long_line(target: Victim, outcome: Outcome, begin: bytes, num_bytes: int) -> None:
    with connected(target.port) as opened:
        send_on(opened, begin, 1) and send_on(opened, b"x" * 65536, num_bytes // 65536)
        outcome.add(heard(opened))


def half_headers(target: Victim, outcome: Outcome, count: int) -> None:
    """More headers without an end than there are descriptors; a client that asks meanwhile is answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            try:
                opened = stack.enter_context(connected(target.port))
                opened.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half: ")
            except OSError:
                outcome.add("closed")
        outcome.add(target.post("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 2}, HEAR_S))


def cut_bodies(target: Victim, outcome: Outcome, count: int, size: int) -> None:
    """All but the last byte of bodies, all at once; then the clients leave."""
    start = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
    body = b'{"prompt": "' + b"x" * (size - 13)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            opened = stack.enter_context(connected(target.port))
            if not send_on(opened, start + body, 1):
                outcome.add(heard(opened, 1.0))


def unread(target: Victim, count: int) -> None:
    """Streams whose clients read nothing, and leave in the midst of them."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    content = json.dumps(body).encode()
    start = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            opened = stack.enter_context(connected(target.port))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send_on(opened, start + content, 1)
            heard(opened)


# The port where nodes join.


def hello() -> bytes:
    """As a node begins, without what only members know."""
    said = msgspec.msgpack.encode([2, 9, random.randbytes(16), 0, True, Terms(), False, random.randbytes(32)])
    return prefix_of(FrameKind.HELLO, said) + said


def join_and(target: Victim, outcome: Outcome, count: int, *said: bytes) -> None:
    """So many connections, which say these things in turn, each one of them, and then wait to be closed."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            try:
                opened.append(stack.enter_context(connected(target.join_port)))
            except OSError:
                outcome.add("closed")
        for each, one in zip(opened, itertools.cycle(said)):
            send_on(each, one, 1)
        until = time.monotonic() + HEAR_S
        outcome.add(*[_ended(each, until) for each in opened])


def _ended(opened: socket.socket, until: float) -> str:
    """Whatever it says before."""
    try:
        while (left_s := until - time.monotonic()) > 0:
            opened.settimeout(left_s)
            if not opened.recv(65536):
                return "closed"
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return "open"


def messages_from_one_on(count: int, size: int) -> bytes:
    """Messages that wait for one before them, which never comes."""
    header = msgspec.msgpack.encode(Heartbeat({f"{at:09}": 0.0 for at in range(size // 19)}))
    return b"".join([prefix_of(FrameKind.DATA, header, seq=number) + header for number in range(1, count + 1)])


def long_frame_header(size: int) -> bytes:
    """All but the last byte of a frame's header."""
    header = bytes(size)
    return (prefix_of(FrameKind.DATA, header) + header)[:-1]
