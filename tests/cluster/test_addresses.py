"""At which addresses nodes reach each other, within a cluster and over links."""

from __future__ import annotations

import socket

import pytest

from isthmus.cluster import own_address
from isthmus.cluster.addresses import AddressBook
from isthmus.cluster.launcher import LinkProcess
from isthmus.cluster.messages import Neighbours
from isthmus.cluster.own_address import outward_host, reached_at
from isthmus.cluster.shaper import LinkSpec, Point, Shape
from isthmus.conductor import LinkRule
from isthmus.errors import ConfigError, StartError, UnavailableError
from isthmus.types import NodeId

A, B, C, FAR = map(NodeId, "abcf")
LINKS = (LinkRule("west", "east", 1), LinkRule("east", "west", 1))


class FakeLink(LinkProcess):
    """Without a process. `said`: to it."""

    def __init__(self, towards_west: tuple[int, ...], towards_east: tuple[int, ...]) -> None:
        super().__init__(("west", "east"), LinkSpec(Shape(), (towards_west, towards_east)))
        self.said: list[Point] = []

    def point(self, point: Point) -> None:
        self.said.append(point)


def test_one_cluster() -> None:
    book = AddressBook()
    book.open(A, "", "h:1")
    book.open(B, "", "h:2")
    assert book.view("", "") == Neighbours("", {A: "h:1", B: "h:2"}) and not book.crosses(A, B)


def test_a_link_as_it_is() -> None:
    book = AddressBook(["east", "west", "north"], LINKS)
    book.open(A, "east", "h:1")
    book.open(FAR, "west", "h:9")
    assert book.crosses(A, FAR) and book.view("east", "west") == Neighbours("east", {A: "h:1"})
    assert book.view("east", "east") == Neighbours("east", {A: "h:1"})
    assert book.linked("east") == ["west"] and book.linked("north") == []
    assert book.view("west", "east") == Neighbours("west", {FAR: "h:9"})
    book.close(FAR)
    assert book.view("west", "east") == Neighbours("west", {})


def test_an_emulated_link_is_entered_at_a_port_for_each_node() -> None:
    book, link = AddressBook(["east", "west"], LINKS), FakeLink((11,), (21, 22))
    book.emulate(link)
    book.open(A, "east", "h:1")
    book.open(B, "east", "h:2")
    book.open(FAR, "west", "h:9")
    assert link.said == [Point(21, "h:1"), Point(22, "h:2"), Point(11, "h:9")]
    assert book.view("east", "east").addresses == {A: "h:1", B: "h:2"}
    assert book.view("east", "west").addresses == {A: "127.0.0.1:21", B: "127.0.0.1:22"}
    assert book.view("west", "east").addresses == {FAR: "127.0.0.1:11"}
    with pytest.raises(UnavailableError, match="the link between east and west has no port left"):
        book.open(C, "east", "h:3")
    book.close(A)
    book.open(C, "east", "h:3")
    assert link.said[3:] == [Point(21, ""), Point(21, "h:3")]
    assert book.view("east", "west").addresses == {B: "127.0.0.1:22", C: "127.0.0.1:21"}


def test_a_link_as_it_is_beside_an_emulated_one() -> None:
    links = (*LINKS, LinkRule("north", "east", 1), LinkRule("east", "north", 1))
    book, link = AddressBook(["north", "east", "west"], (*links[2:], *links[:2])), FakeLink((11,), (21,))
    book.emulate(link)
    book.open(A, "east", "h:1")
    assert book.linked("east") == ["north", "west"]
    assert book.view("east", "north").addresses == {A: "h:1"}
    assert book.view("east", "west").addresses == {A: "127.0.0.1:21"}


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
    monkeypatch.setattr(own_address, "_own_host", lambda join, limit_s: "10.0.0.7")
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
    monkeypatch.setattr(own_address, "_source_of", lambda host, port: f"from here to {host}")
    assert outward_host(host) == f"from here to {'2001:db8::1' if host == '::' else '192.0.2.1'}"

    def nowhere(host: str, port: int) -> str:
        raise OSError("no route")

    monkeypatch.setattr(own_address, "_source_of", nowhere)
    assert outward_host(host) == socket.gethostname()


def test_a_head_whose_name_nobody_knows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, "RETRY_S", 0.01)
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
