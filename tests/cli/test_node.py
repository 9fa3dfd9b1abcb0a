"""What `isthmus node` says when it cannot begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.node import node
from isthmus.core.errors import ConfigError
from isthmus.core.types import Role
from isthmus.live.cluster.authority import Authority

from .conftest import Command


@pytest.mark.parametrize("role", Role)
def test_a_node_needs_a_head_to_join(role: Role) -> None:
    with pytest.raises(
        ConfigError, match=r"^isthmus node needs --role \S+ and --join isthmus://HOST:PORT#TOKEN$"
    ):
        node(role=role)


@pytest.mark.parametrize("join", ["head", "head:", "head:x", ":7000", "head:70000"])
def test_where_the_head_is_must_be_an_address(isthmus: Command, join: str) -> None:
    said = isthmus("node", "--role", "decode", "--join", join)
    assert said == (2, "", f"isthmus: error: --join: {join!r} is not HOST:PORT\n")


def test_a_join_token_that_is_not_whole_is_refused_and_files_beside_one_are(
    isthmus: Command, tmp_path: Path
) -> None:
    status, _, said = isthmus("node", "--role", "decode", "--join", "isthmus://head:7000#A46tip")
    assert status == 2 and said.startswith("isthmus: error: --join: the token after # is not whole")
    file = tmp_path / "files.yaml"
    file.write_text("tls: {certificate: a, key: b, authority: c}")
    status, _, said = isthmus("node", "--role", "decode", "--join", f"isthmus://head:7000#{'A' * 44}")
    assert (
        status == 2 and said == "isthmus: error: --join: the token after # is damaged: it names no authority\n"
    )
    join = f"isthmus://head:7000#{Authority.made().pin}c2VjcmV0"
    status, _, said = isthmus("node", "--role", "decode", "--join", join, "--config", file)
    assert status == 2 and said.startswith("isthmus: error: tls: --join with a token takes the place of")


@pytest.mark.parametrize("token", [None, ""])
def test_a_node_needs_a_token(isthmus: Command, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("ISTHMUS_TOKEN", token)
    status, _, said = isthmus("node", "--role", "decode", "--join", "head:7000")
    assert status == 2 and said.startswith("isthmus: error: the cluster's token is needed: set ISTHMUS_TOKEN")


def test_a_host_that_is_no_address_is_refused(
    isthmus: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ISTHMUS_TOKEN", "secret")
    file = tmp_path / "emulated.yaml"
    file.write_text("engine: {kind: emulated, hardware: h200}")
    where = ("--join", "127.0.0.1:1", "--host", "0.0.0.0", "--config", file)
    status, _, said = isthmus("node", "--role", "decode", *where)
    assert status == 2 and said.startswith("isthmus: error: --host: ") and said.count("\n") == 1
