"""API keys and tenants of a whole cluster: what is refused, what is not hit, and what a flood costs others."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from isthmus.cli.serve import say_if_open
from isthmus.config import Config, key_digest, with_keys
from isthmus.core.conductor import Event, FirstToken, RequestArrived
from isthmus.live.cluster.recorder import replay
from tests.cli.conftest import Command
from tests.cli.conftest import isthmus as isthmus
from tests.inside import Inside, inside
from tests.served import Client, serve

ACME, NEW, GLOBEX = "sk-acme-old", "sk-acme-new", "sk-globex"
KEYS = [
    {"tenant": tenant, "sha256": key_digest(key)}
    for tenant, key in (("acme", ACME), ("acme", NEW), ("globex", GLOBEX))
]
EMULATED = {"engine": {"kind": "emulated", "hardware": "h200"}}


def prompt(seed: int) -> list[int]:
    return [random.Random(seed).randrange(256) for _ in range(100)]


def cached(served: Client, key: str, seed: int, **fields: Any) -> int:
    """Prompt tokens that came from a cache, of whose blocks the conductor knows."""
    if isinstance(served, Inside):
        served.check_idle()
    body = {"prompt": prompt(seed), "max_tokens": 2, "ignore_eos": True, **fields}
    reply = httpx.post(
        f"{served.url}/v1/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
        trust_env=False,
    )
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("roles", [{"mixed": 1, "prefill": 0, "decode": 0}, {"prefill": 2, "decode": 1}])
def test_another_tenant_s_cache_is_not_hit(roles: dict[str, int]) -> None:
    settings = {**EMULATED, "roles": roles, "cache": {"dram": "64MiB"}, "auth": {"keys": KEYS}}
    with inside(settings, key=ACME) as served:
        with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as stranger:
            assert stranger.get("/v1/models").status_code == stranger.get("/status").status_code == 401
            assert stranger.get("/health").status_code == 200
        assert cached(served, ACME, 1) == 0
        assert cached(served, ACME, 1) >= 64
        assert cached(served, NEW, 1) >= 64, "two keys of one tenant"
        assert cached(served, GLOBEX, 1) == 0
        assert cached(served, GLOBEX, 1, cache_salt="4:acme:") == 0, "whatever it says"
        assert cached(served, GLOBEX, 1) >= 64
        assert cached(served, ACME, 1, cache_salt="own") == 0, "a client's salt still separates"
        assert cached(served, NEW, 1, cache_salt="own") >= 64


def test_a_key_is_seen_nowhere(tmp_path: Path, isthmus: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the file, one of the environment, one of the command line: all open, none is told."""
    monkeypatch.setenv("ISTHMUS_API_KEY", "sk-environment")
    keys = [ACME, "sk-environment", "sk-command-line"]
    # Tokens far apart: of an answer that comes at once no gap can be timed, which `bench` says.
    cost = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 2e-5, "decode_fixed_s": 0.01}
    engine = {"kind": "emulated", "cost": cost}
    settings = {"engine": engine, "roles": {"mixed": 1, "prefill": 0, "decode": 0}, "auth": {"keys": KEYS}}
    options = ("--host", "0.0.0.0", "--record", str(tmp_path / "flight.jsonl"), "--api-key", "sk-command-line")
    with serve(tmp_path, settings, *options, key=ACME) as served:
        url = served.url.replace("0.0.0.0", "127.0.0.1")
        for key in keys:
            assert cached(served, key, 2) == (0 if key != "sk-command-line" else 96), "its tenant: the default"
        bench = ("bench", "serve", "--url", url, "--row", "8/60/1/1", "--rounds", 1)
        for verb in (("status", "--url", url, "--json"), bench):
            status, out, err = isthmus(*verb)
            assert status == 0 or "cannot be timed" in err, err
            (tmp_path / f"{verb[0]}.out").write_text(out + err)
        for verb in (("status", "--url", url), bench):
            status, out, err = isthmus(*verb, "--api-key", "sk-nobody")
            assert status != 0 and "401" in err, (out, err)
            (tmp_path / f"{verb[0]}.refused").write_text(out + err)
        for node in served.children().values():
            assert b"sk-environment" not in Path(f"/proc/{node}/environ").read_bytes()
        page = served.http.get("/status").text + served.http.get("/metrics").text
        (tmp_path / "pages").write_text(page)
        assert 'requests_failed_total{status="401"}' in page
    said = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert {"serve.log", "flight.jsonl", "status.out", "bench.refused"} <= said.keys()
    assert not [(name, key) for name, text in said.items() for key in [*keys, "sk-nobody"] if key in text]
    assert not [
        key for key in keys if key_digest(key) in said["flight.jsonl"] + said["pages"] + said["serve.log"]
    ]
    assert "no API keys" not in said["serve.log"] and "Bearer $ISTHMUS_API_KEY" in said["serve.log"]
    labels = re.findall(r'"tenant":"([^"]*)"', said["flight.jsonl"])
    assert len(set(labels)) == 2 and all(re.fullmatch("[0-9a-f]{16}", label) for label in labels)
    recordings = sorted(tmp_path.glob("flight*.jsonl"))
    assert len(recordings) == 2
    for path in recordings:
        assert path.stat().st_mode & 0o777 == 0o600 and replay(path)[1] is None
        assert not re.search('"(acme|default)"', path.read_text()), f"{path.name} names a tenant"


OPEN = (
    "isthmus: whoever reaches {} port 80 can use this server: there are no API keys "
    "(ISTHMUS_API_KEY, or auth.keys in the file)"
)


@pytest.mark.parametrize(
    "bound", [("0.0.0.0", 80), ("192.168.0.7", 80), ("::", 80, 0, 0), ("fe80::1%eth0", 80, 0, 2)]
)
def test_in_red_where_others_reach_it(
    bound: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    say_if_open(Config(), bound)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"\x1b[1;31m{OPEN.format(bound[0])}\x1b[0m\n")
    say_if_open(with_keys(Config(), ["sk-own"]), bound)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("bound", [("127.0.0.1", 80), ("127.9.0.1", 80), ("::1", 80, 0, 0)])
def test_nothing_is_said_on_loopback(bound: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say_if_open(Config(), bound)
    assert capsys.readouterr() == ("", "")


BLOCKS = 8
"""Full blocks of a prompt; an answer of one token fills no more."""
MIXED, APART = {"mixed": 1, "prefill": 0, "decode": 0}, {"prefill": 1, "decode": 1}


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """No two of them share anything."""
    drawn = random.Random(seed)
    return [[drawn.randrange(256) for _ in range(BLOCKS * 16 + 1)] for _ in range(count)]


def ask(served: Inside, key: str, prompts: list[list[int]]) -> int:
    """All of them in one HTTP request. Returns how many of their blocks came from a cache."""
    body, headers = {"prompt": prompts, "max_tokens": 1}, {"Authorization": f"Bearer {key}"}
    url = f"{served.url}/v1/completions"
    reply = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]) // 16


def test_many_prompts_of_one_tenant_leave_another_about_half_of_what_fits() -> None:
    fits, engine = 112, {**EMULATED["engine"], "kv_memory": "4MiB"}
    settings = {
        "engine": engine, "roles": MIXED, "cache": {"dram": "4MiB"}, "auth": {"keys": KEYS, "metrics": "tenants"}
    }  # fmt: skip
    with inside(settings, key=ACME) as served:
        own = prompts_of(1, 20)
        ask(served, GLOBEX, own)
        for at in range(0, 160, 20):
            ask(served, ACME, prompts_of(2 + at, 20))
        served.check_idle()
        served.be_told()
        text = served.http.get("/metrics").text
        kept = ask(served, GLOBEX, own[: -1 - fits // BLOCKS // 2 : -1])
        assert 0.35 * fits <= kept <= 0.65 * fits
        for tenant in ("acme", "globex"):
            assert (
                f'isthmus_tenant_cache_bytes{{node="{served.processes[0]._facts.node}",tenant="{tenant}"}}'
                in text
            )


def test_a_tenant_behind_another_s_flood_is_answered_in_its_turn() -> None:
    engine = {**EMULATED["engine"], "max_sequences": 4}
    with inside({"engine": engine, "roles": APART, "auth": {"keys": KEYS}}, key=ACME) as served:
        tenant_of, order, on = dict[str, str](), list[str](), served.head._desk.conductor.on

        def heard(event: Event, now: int) -> Any:
            if isinstance(event, RequestArrived):
                tenant_of[event.request] = event.tenant
            elif isinstance(event, FirstToken):
                order.append(tenant_of[event.request])
            return on(event, now)

        with (
            mock.patch.object(served.head._desk.conductor, "on", heard),
            served.together(66),
            ThreadPoolExecutor(2) as pool,
        ):
            flood = pool.submit(ask, served, ACME, prompts_of(1, 60))
            served.wait_until_asked(60)
            own = pool.submit(ask, served, GLOBEX, prompts_of(2, 6))
            flood.result(), own.result()
        acme, globex = map(served.head._alias_of, ("acme", "globex"))
        last = len(order) - order[::-1].index(globex)
        assert order.count(globex) == 6 and order.count(acme) == 60
        assert order[:last].count(acme) <= 16  # as many turns, and what had begun before
