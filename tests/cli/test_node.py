"""What `isthmus node` says when it cannot begin."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.live.cluster.authority import Authority

from .conftest import Command

HEAD = "isthmus://head:7000"
NO_TOKEN = "the cluster's token is needed: set ISTHMUS_TOKEN"
FILES = "tls: {certificate: a, key: b, authority: c}"
EMULATED = "engine: {kind: emulated, hardware: h200}"


@pytest.mark.parametrize(
    ("options", "token", "text", "said"),
    [
        ((), None, "", "isthmus node needs --role prefill|decode|mixed|attention and --join isthmus://HOST:PORT#TOKEN"),
        *[
            (("--join", join), None, "", f"--join: {join!r} is not HOST:PORT")
            for join in ("head", "head:", "head:x", ":7000", "head:70000")
        ],
        (("--join", f"{HEAD}#A46tip"), None, "", "--join: the token after # is not whole"),
        (("--join", f"{HEAD}#{'A' * 44}"), None, "", "--join: the token after # is damaged: it names no authority"),
        (("--join", f"{HEAD}#{Authority.made().pin}c2VjcmV0"), None, FILES, "tls: --join with a token takes the place"),
        (("--join", "head:7000"), None, "", NO_TOKEN),
        (("--join", "head:7000"), "", "", NO_TOKEN),
        (("--join", "127.0.0.1:1", "--host", "0.0.0.0"), "secret", EMULATED, "--host: "),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_one_line(
    isthmus: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[str, ...],
    token: str | None,
    text: str,
    said: str,
) -> None:
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("ISTHMUS_TOKEN", token)
    file = tmp_path / "file.yaml"
    file.write_text(text)
    status, out, err = isthmus("node", "--role", "decode", *options, "--config", file)
    assert (status, out) == (2, "") and err.startswith(f"isthmus: error: {said}") and err.count("\n") == 1
