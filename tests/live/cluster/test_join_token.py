"""What nodes of other machines are told to join with, and at which address they are reached."""

from __future__ import annotations

import socket

import pytest

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.cluster import authority
from isthmus.live.cluster.authority import JoinToken, outward_host, reached_at

PIN = "A" * 43 + "_"


@pytest.mark.parametrize("address", ["head:7000", "10.0.0.1:7000", "[fd00::1]:7000"])
@pytest.mark.parametrize("secret", ["", "secret", "with # and / and é", "x" * 200])
def test_a_token_is_read_as_it_was_written(address: str, secret: str) -> None:
    token = JoinToken(address, PIN, secret)
    assert JoinToken.parse(str(token)) == token
    assert str(token).startswith(f"isthmus://{address}#") and " " not in str(token)


def test_an_address_alone_names_no_authority() -> None:
    assert JoinToken.parse("head:7000") == JoinToken("head:7000", "", "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("head", "is not HOST:PORT"),
        ("isthmus://head#" + PIN, "is not HOST:PORT"),
        ("isthmus://head:7000", "not whole"),
        ("isthmus://head:7000#", "not whole"),
        ("isthmus://head:7000#" + PIN[1:], "not whole"),
        ("isthmus://head:7000#" + PIN[:-1] + "!", "not whole"),
        ("isthmus://head:7000#" + PIN + "c2VjcmV0!", "damaged"),
        ("isthmus://head:7000#" + PIN + "_____w", "damaged"),
    ],
)
def test_a_token_that_was_damaged_is_refused_and_not_quoted(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        JoinToken.parse(text)
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_node_is_where_it_reaches_its_head_from(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as head:
        try:
            head.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        join = f"[{host}]:{head.getsockname()[1]}"
        assert reached_at(None, join, 0) == host == reached_at(host, join, 0)
    assert reached_at(None, "localhost:1", 0) in ("127.0.0.1", "::1")
    assert reached_at(None, "0.0.0.0:1", 0) == "127.0.0.1", (
        "a head that listens everywhere, and a node beside it"
    )


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (
            "0.0.0.0",
            "--host: other nodes reach this one there, and nobody is reached at 0.0.0.0; leave it out for 10.0",
        ),
        ("::", "nobody is reached at ::; "),
        (
            "127.0.1.1",
            "--host: no other machine reaches this one at 127.0.1.1, a loopback address; leave it out for",
        ),
        ("localhost", "no other machine reaches this one at localhost"),
        ("no.such.name.invalid", "--host no.such.name.invalid: "),
    ],
)
def test_an_address_that_leads_nobody_to_a_node_is_refused(
    host: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "_own_host", lambda join, limit_s: "10.0.0.7")
    with pytest.raises(ConfigError) as caught:
        reached_at(host, "head:1", 0)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["10.0.0.1", "head", "fd00::1", "127.0.0.1"])
def test_an_address_of_its_own_is_told_as_it_is(host: str) -> None:
    assert outward_host(host) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_in_place_of_all_addresses_the_one_that_reaches_others_is_told(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "_source_of", lambda host, port: f"from here to {host}")
    assert outward_host(host) == f"from here to {'2001:db8::1' if host == '::' else '192.0.2.1'}"

    def nowhere(host: str, port: int) -> str:
        raise OSError("no route")

    monkeypatch.setattr(authority, "_source_of", nowhere)
    assert outward_host(host) == socket.gethostname()


def test_a_head_whose_name_nobody_knows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "RETRY_S", 0.01)
    with pytest.raises(StartError, match=r"^cannot reach the head at no\.such\.name\.invalid:1: "):
        reached_at(None, "no.such.name.invalid:1", 0.02)
    known, asked = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_DGRAM), list[object]()

    def look_up(host: str, *rest: object, **others: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert reached_at(None, "head:1", 30) == "127.0.0.1" and asked == ["head"] * 3
