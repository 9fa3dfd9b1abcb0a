"""Who may change the servers of a router, and what is read of a change."""

from __future__ import annotations

import hashlib

import pytest

from isthmus.live.gateway.operator import MAX_BYTES, PATH
from isthmus.live.gateway.passing import create_passing_app
from isthmus.live.gateway.settings import ApiKey, GatewaySettings

from .server import fronted, get, post
from .test_passing import Backend

TOKEN = "Authorization: Bearer of-operator"
KEY = ApiKey("acme", hashlib.sha256(b"of-tenant").digest())
SETTINGS = GatewaySettings(operator=hashlib.sha256(b"of-operator").digest(), keys=(KEY,))


def test_the_operator_changes_servers() -> None:
    backend = Backend()
    with fronted(create_passing_app(backend, SETTINGS)) as front:
        answer = front.ask(post(PATH, b'{"add": ["http://a:1"], "remove": ["http://b:1"]}', TOKEN))
        assert (answer.status, answer.body) == (200, b'{"servers":["a line"]}')
        refused = front.ask(post(PATH, b'{"add": ["ftp://x"]}', TOKEN))
        assert refused.status == 400 and b"is no server" in refused.body
    assert backend.changes == [(["http://a:1"], ["http://b:1"]), (["ftp://x"], [])]
    assert not backend.passed


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Authorization: Bearer of-tenant",),
        ("Authorization: Bearer ",),
        (TOKEN, TOKEN),
        ("Origin: http://localhost",),
    ],
    ids=["nothing", "a tenant's key", "an empty token", "two tokens", "a page of this machine"],
)
@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["no keys", "keys"])
def test_nobody_else_does(headers: tuple[str, ...], keys: tuple[ApiKey, ...]) -> None:
    backend, settings = Backend(), GatewaySettings(operator=SETTINGS.operator, keys=keys)
    with fronted(create_passing_app(backend, settings)) as front:
        answer = front.ask(post(PATH, b'{"add": ["http://evil:1"]}', *headers))
    assert answer.status == 401 and b"ISTHMUS_TOKEN" in answer.body
    assert not backend.changes and not backend.passed


def test_without_a_token_nobody_does() -> None:
    backend = Backend()
    with fronted(create_passing_app(backend, GatewaySettings())) as front:
        for header in ("X-None: 1", "Authorization: Bearer ", TOKEN):
            answer = front.ask(post(PATH, b'{"add": ["http://evil:1"]}', header))
            assert answer.status == 403 and b"start it with ISTHMUS_TOKEN" in answer.body
    assert not backend.changes


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (get(PATH, TOKEN), 405),
        (post(PATH, b"{}", TOKEN), 400),
        (post(PATH, b'{"add": "http://a:1"}', TOKEN), 400),
        (post(PATH, b'{"added": ["http://a:1"]}', TOKEN), 400),
        (post(PATH, b'{"add": [' + b"[" * 60_000, TOKEN), 400),
        (post(PATH, b'{"add": ["\xff"]}', TOKEN), 400),
        (post(PATH, b'{"add": [' + b'"a",' * 300 + b'"a"]}', TOKEN), 400),
        (post(PATH, b" " * (MAX_BYTES + 1), TOKEN), 413),
        (post(f"{PATH}/", b"{}", TOKEN), 401),
        (post(f"/v1/..{PATH}", b"{}", "Authorization: Bearer of-tenant"), 404),
    ],
)
def test_what_is_no_change_is_refused(asked: bytes, status: int) -> None:
    backend = Backend()
    with fronted(create_passing_app(backend, SETTINGS)) as front:
        assert front.ask(asked).status == status
    assert not backend.changes
