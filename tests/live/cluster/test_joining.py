"""How nodes join: the token and the address that they are told, and a head that waits for nodes that others start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.served import reserved_port
from isthmus.cli.models import bytes_folder
from isthmus.cli.serve import assemble, say_if_plain
from isthmus.config import load_config
from isthmus.core.errors import ConfigError, StartError
from isthmus.live.cluster import joining
from isthmus.live.cluster.joining import JoinToken, outward_host, reached_at
from isthmus.live.cluster.launcher import LocalLauncher
from isthmus.live.cluster.local import JoinedCluster, signs
from isthmus.live.engine.emulated import expected_tokens, recipe_of
from tests.served import LIMIT_S, Client, command, refused, wait_until_ready

EMULATED = {"kind": "emulated", "hardware": "h200", "kv_memory": "64MiB", "threads": 1}
TWO = {"east": {"roles": {"decode": 1}}, "west": {"roles": {"prefill": 2}}}
LINKS = [{"between": ["east", "west"], "gbps": 1, "emulate": "none"}]


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[Any]]]:
    found: list[subprocess.Popen[Any]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as found:
        yield found


def test_a_head_is_ready_when_as_many_have_joined_as_the_file_says(
    tmp_path: Path, port: int, running: list[subprocess.Popen[Any]]
) -> None:
    """Of each cluster, under whatever names; nodes that were there first have waited for it. With a token in the
    file; with one that is kept, `test_nodes_join_with_the_line_that_serve_prints`."""
    file, log = tmp_path / "join.yaml", tmp_path / "serve.log"
    settings = {"placement": "join", "join_port": port, "clusters": TWO, "links": LINKS, "engine": EMULATED}
    limits = {"silence_s": 60, "rejoin_s": 60}
    file.write_text(json.dumps(settings | {"token": "secret", "limits": limits}))

    def start(verb: str, *arguments: str, log: Path) -> subprocess.Popen[Any]:
        with log.open("wb") as sink:
            run = command(verb, "--config", str(file), *arguments)
            environment = {name: value for name, value in os.environ.items() if name != "ISTHMUS_TOKEN"}
            running.append(subprocess.Popen(run, stdout=sink, stderr=sink, env=environment))
        return running[-1]

    def node(cluster: str, role: str, name: str) -> None:
        where = ("--join", f"localhost:{port}", "--cluster", cluster, "--role", role, "--name", name)
        start("node", *where, log=tmp_path / f"{name}.log")

    node("west", "prefill", "anna")
    serve = start("serve", "--port", "0", log=log)
    node("west", "prefill", "bert")
    node("east", "decode", "cleo")
    url, names = wait_until_ready(serve, log)
    assert names == {"anna", "bert", "cleo"}
    told = f"isthmus: waiting for 1 decode of east, 2 prefill of west nodes to join at 127.0.0.1:{port}\n"
    assert told in log.read_text() and "a connection from" not in log.read_text()
    assert "--join isthmus://" not in log.read_text()
    served, prompt = Client(url), list(range(200))
    recipe = recipe_of(bytes_folder(), bytes_folder(), 16)
    assert served.tokens(prompt, 20, ignore_eos=True) == expected_tokens(recipe, prompt, 20)
    served.http.close()
    serve.send_signal(signal.SIGTERM)
    assert [process.wait(LIMIT_S) for process in running] == [0] * 4
    for name in names:
        assert (tmp_path / f"{name}.log").read_text().endswith(f"{name}: stopped by the head\n")


def test_a_node_that_is_told_to_end_while_it_waits_for_its_head_ends(
    tmp_path: Path, port: int, running: list[subprocess.Popen[Any]]
) -> None:
    file, join = tmp_path / "join.yaml", f"127.0.0.1:{port}"
    file.write_text(json.dumps({"engine": EMULATED, "token": "secret"}))
    run = command("node", "--config", str(file), "--role", "mixed", "--join", join, "--name", "m")
    running.append(subprocess.Popen(run, stderr=subprocess.PIPE, text=True))
    assert running[0].stderr is not None
    assert running[0].stderr.readline().startswith(f"isthmus: waiting up to 120 s for the head at {join}: ")
    running[0].terminate()
    assert running[0].wait(LIMIT_S) == 0
    with running[0].stderr as rest:
        assert rest.read() == "m: ended by a signal\n"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"token": None},
            "placement: join: nodes need the cluster's token: set ISTHMUS_TOKEN, or token in the file",
        ),
        (
            {"roles": {"prefill": {"count": 2, "pipeline": 2}, "decode": 1}},
            "roles.prefill.pipeline: groups are started with placement: local only",
        ),
        (
            {"clusters": TWO, "links": [{"between": ["east", "west"], "gbps": 1}]},
            "links: between east and west: placement: join has no emulated links; write emulate: none",
        ),
        ({"roles": {"prefill": 1, "decode": 0}}, "roles: no request could be served: "),
    ],
)
def test_what_cannot_be_joined_is_refused(
    settings: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    file = tmp_path / "join.yaml"
    file.write_text(json.dumps({"placement": "join", "token": "secret"} | settings))
    status, line = refused("--config", str(file))
    assert status == 2 and line.startswith(f"isthmus: error: {told}")


def test_nodes_of_other_machines_take_no_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.live.cluster.launcher.available_bytes", lambda: 0)
    overrides = {f"engine.{name}": value for name, value in EMULATED.items()}
    config = load_config(None, {**overrides, "placement": "join", "token": "secret"})
    assert isinstance(assemble(config, LocalLauncher())[0], JoinedCluster)


FILES = {"tls.certificate": "a", "tls.key": "b", "tls.authority": "c"}


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({}, False),
        ({"join_host": "localhost"}, False),
        ({"join_host": "::1", "tls.mode": "none"}, False),
        ({"join_host": "0.0.0.0"}, False),
        ({"join_host": "0.0.0.0", "tls.mode": "none"}, True),
        ({"join_host": "head", "tls.mode": "none"}, True),
        ({"join_host": "0.0.0.0", **FILES}, False),
    ],
)
def test_what_insecure_gives_up_is_said_in_one_line(
    settings: dict[str, Any], plain: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, settings)
    say_if_plain(config, config.join_host)
    said = capsys.readouterr().err
    assert ("can read all prompts, answers and KV" in said) is plain and said.count("\n") == plain


@pytest.mark.parametrize(
    ("settings", "secured"),
    [
        ({}, False),
        ({"join_host": "localhost"}, False),
        ({"join_host": "127.0.0.2"}, False),
        ({"join_host": "::1"}, False),
        ({"join_host": "::"}, True),
        ({"join_host": "0.0.0.0"}, True),
        ({"join_host": "10.0.0.1"}, True),
        ({"join_host": "head"}, True),
        ({"tls.folder": "here"}, True),
        ({"join_host": "head", "tls.mode": "none"}, False),
        ({"join_host": "head", **FILES}, False),
    ],
)
def test_the_head_has_an_authority_beyond_loopback(settings: dict[str, Any], secured: bool) -> None:
    config = load_config(None, settings)
    assert signs(config, config.join_host) is secured


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
    monkeypatch.setattr(joining, "_own_host", lambda join, limit_s: "10.0.0.7")
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
    monkeypatch.setattr(joining, "_source_of", lambda host, port: f"from here to {host}")
    assert outward_host(host) == f"from here to {'2001:db8::1' if host == '::' else '192.0.2.1'}"

    def nowhere(host: str, port: int) -> str:
        raise OSError("no route")

    monkeypatch.setattr(joining, "_source_of", nowhere)
    assert outward_host(host) == socket.gethostname()


def test_a_head_whose_name_nobody_knows_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "RETRY_S", 0.01)
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
