"""`isthmus route`: a process before two servers, asked by OpenAI's client; and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from isthmus.live.cluster.private import kept
from tests.cli.conftest import Command
from tests.live.servers.plain_fake import WORDS, FakeServer
from tests.live.servers.split_fake import FakeHalf, Kept
from tests.served import LIMIT_S, START_S, command

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def running(servers: Sequence[FakeServer]) -> Iterator[None]:
    """Servers in a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(LIMIT_S)
    try:
        yield
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    found = [FakeServer(), FakeServer()]
    with running(found):
        yield found


@contextlib.contextmanager
def routing(folder: Path, *arguments: object) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """A router in a process of its own: its URL, what it says, the process."""
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command("route", *map(str, arguments), "--port", "0"), stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + START_S
        while " servers (ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield log.read_text().split(" routes ")[1].split()[0], log, process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0, log.read_text()


def test_openai_s_client_before_two_servers(
    isthmus: Command, servers: list[FakeServer], tmp_path: Path
) -> None:
    urls = [servers[0].url.removeprefix("http://"), servers[1].url + "/v1/"]
    with routing(tmp_path, *urls, "--record", tmp_path / "flight.jsonl") as (url, log, _):
        assert " to 2 servers " in log.read_text()
        assert log.read_text().count("m, vllm, 1,024 tokens of KV memory") == 2
        with OpenAI(base_url=f"{url}/v1", api_key="of-client") as client:
            assert [model.id for model in client.models.list()] == ["m"]
            for _ in range(3):
                chunks = client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "Tell me an old story of the sea. " * 8}],
                    stream=True,
                )
                assert "".join(
                    each.choices[0].delta.content or "" for each in chunks if each.choices
                ) == "".join(WORDS)
        assert sorted(len(server.bodies) for server in servers) == [0, 3], "one prompt, one cache"
        code, out, _ = isthmus("status", "--url", url)
        assert code == 0 and "2 of 2 servers" in out and servers[0].url in out and "80.0" in out
    code, out, _ = isthmus("replay", str(tmp_path / "flight.jsonl"))
    assert code == 0 and out.endswith("events, identical decisions\n")
    code, out, _ = isthmus(
        "simulate",
        "--trace",
        str(tmp_path / "flight.jsonl"),
        "--config",
        str(ROOT / "examples/mooncake-fast25.yaml"),
    )
    assert code == 0 and "| requests                | 3 " in out
    code, out, err = isthmus("simulate", "--trace", str(tmp_path / "flight.jsonl"))
    assert (
        code
        and out == ""
        and "streamed answers ended in this recording; 20 or more" in err
        and err.count("\n") == 1
    )


def ask_until(url: str, number: int, over: threading.Event, ended: list[str]) -> None:
    """Asks one question after another; adds what each is answered with."""
    with OpenAI(base_url=f"{url}/v1", api_key="of-client", max_retries=0) as client:
        for turn in itertools.count():
            chunks = client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": f"{number} {turn} An old story of the sea. "}],
                stream=True,
            )
            ended.append("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))
            if over.is_set():
                return


def test_servers_come_and_go_under_load(
    isthmus: Command, servers: list[FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operator and by the file: every request that was begun ends whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "route.yaml"
    one, other = servers[0].url, servers[1].url
    file.write_text(f"servers: {one}\nlimits: {{rejoin_s: 5}}\n")
    ended: list[str] = []
    over = threading.Event()
    with routing(tmp_path, "--config", file) as (url, log, process), ThreadPoolExecutor(6) as pool:

        def wait_until(holds: Callable[[], bool]) -> None:
            until = time.monotonic() + LIMIT_S
            while not holds():
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.01)

        def more_end() -> None:
            """Several requests begin and end after what was done last."""
            count = len(ended)
            wait_until(lambda: len(ended) >= count + 20)

        def names(*urls: str) -> bool:
            return {each["server"] for each in httpx.get(f"{url}/status").json()["servers"]} == set(urls)

        def file_names(*urls: str) -> None:
            file.write_text("servers:\n" + "".join(f"- {each}\n" for each in urls) + "limits: {rejoin_s: 5}\n")
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: names(*urls))

        def changed(verb: str, *urls: str) -> str:
            code, out, err = isthmus("route", verb, *urls, "--to", url)
            assert code == 0, err
            return out

        asking = [pool.submit(ask_until, url, number, over, ended) for number in range(6)]
        try:
            more_end()
            for _ in range(3):
                assert changed("add", other) == f"{other}: m, vllm, 1,024 tokens of KV memory\n"
                more_end()
                assert changed("remove", one).startswith(f"{one}: ")
                more_end()
                changed("add", one)
                assert changed("remove", other).startswith(f"{other}: ")
            wait_until(lambda: names(one))
            for _ in range(3):
                file_names(one, other)
                more_end()
                file_names(other)
                more_end()
                file_names(one)
            file.write_text("servers: [ftp://typo]\n")
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "the servers stay as they are" in log.read_text())
            more_end()
            assert names(one)
        finally:
            over.set()
        for each in asking:
            each.result(LIMIT_S)
        assert set(ended) == {"".join(WORDS)}
        num_sent = sum(len(server.bodies) for server in servers)
        assert num_sent >= len(ended), (
            "a request was not sent"
        )  # on a slow machine some move, and servers are probed
        assert min(len(server.bodies) for server in servers) >= 20
        code, _, err = isthmus("route", "remove", "http://nobody:1", "--to", url)
        assert code and f"{url}: http://nobody:1 is not here; there are {one}" in err
        monkeypatch.setenv("ISTHMUS_TOKEN", "of another router")
        code, _, err = isthmus("route", "add", other, "--to", url)
        assert code and "this needs the operator's token" in err and err.count("\n") == 1


def test_a_kept_token_is_shown_to_this_machine_alone(
    isthmus: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    kept(tmp_path / "isthmus/operator.token", lambda: b"secret")
    code, _, err = isthmus("route", "add", "http://host:1", "--to", "http://nobody.invalid:1")
    assert code == 2 and "operator's token of http://nobody.invalid:1 is needed: set ISTHMUS_TOKEN" in err
    with socket.create_server(("127.0.0.1", 0)) as unused:
        here = f"http://127.0.0.1:{unused.getsockname()[1]}"
    code, _, err = isthmus("route", "add", "http://host:1", "--to", here)
    assert code and f"nothing answers at {here}" in err
    (tmp_path / "isthmus/operator.token").chmod(0o644)
    code, _, err = isthmus("route", "add", "http://host:1", "--to", here)
    assert code == 2 and "others can read it" in err and err.count("\n") == 1


def test_serve_takes_a_file_of_servers_and_tells_mixtures(
    isthmus: Command, servers: list[FakeServer], tmp_path: Path
) -> None:
    file = tmp_path / "route.yaml"
    file.write_text(f"servers: [{servers[0].url}]\nengine: {{kind: emulated}}\n")
    for verb in ("serve", "route"):
        code, _, err = isthmus(verb, "--config", file)
        assert code == 2 and err.count("\n") == 1
        assert f"{file}:2: engine: is of nodes that Isthmus starts, and servers run already" in err
    file.write_text(f"servers: [{servers[0].url}]\nport: 99999\n")
    code, _, err = isthmus("serve", "--config", file)
    assert code == 2 and "port" in err
    file.write_text("servers:\n- 127.0.0.1:9\n")
    code, _, err = isthmus("serve", "--config", file, "--port", "0")
    assert code == 4 and "no server answers: http://127.0.0.1:9" in err
    code, _, err = isthmus("serve", "--config", file, "--mixed", "2")
    assert code == 2 and "roles: is of nodes" in err
    workload = "poisson:rate=8,num=50,input=1500,output=9"
    code, _, err = isthmus("simulate", "--config", file, "--workload", workload)
    assert code == 2 and "servers: they run already" in err and err.count("\n") == 1


def test_prefill_and_decode_apart(isthmus: Command, tmp_path: Path) -> None:
    halves, flight = Kept(), tmp_path / "flight.jsonl"
    prefill, decode = FakeHalf(halves), FakeHalf(halves)
    with running([prefill, decode]):
        options = ("--threshold", "40", "--record", flight)
        with routing(tmp_path, "--prefill", prefill.url, "--decode", decode.url, *options) as (url, _, _):
            with OpenAI(base_url=f"{url}/v1", api_key="of-client") as client:
                for prompt in ("short", "Tell me an old story of the sea. " * 8):
                    answer = client.completions.create(model="m", prompt=prompt, max_tokens=9)
                    assert answer.model_dump()["prompt"] == prompt
                with pytest.raises(BadRequestError, match="kv_transfer_params is not for clients"):
                    client.completions.create(model="m", prompt="x", extra_body={"kv_transfer_params": {}})
            assert len(prefill.legs) == len(decode.legs) == 1 and halves.used == ["kept-0"]
            code, out, _ = isthmus("status", "--url", url)
            assert code == 0 and "prefill" in out and "decode" in out
    code, out, _ = isthmus("replay", str(flight))
    assert code == 0 and out.endswith("events, identical decisions\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prefill", "http://a:1", "http://b:1", "--port", "0"), "--prefill needs --decode"),
        (("--decode", "http://a:1"), "--decode needs --prefill"),
        (("http://a:1", "--threshold", "5"), "--threshold is for servers apart"),
        (("--prefill", "http://a:1", "http://b:1", "--decode", "b:1"), "http://b:1 is given twice"),
        (("ftp://host",), "'ftp://host' is no server: write http://HOST:PORT"),
        (("http://host/path",), "'http://host/path' is no server"),
        (("http://127.0.0.1:9", "--policy", "nearest"), "policy: no policy"),
        ((), "no servers are given; write isthmus route http://HOST:PORT"),
        (("--config", "/dev/null"), "/dev/null: servers: is missing"),
        (("http://127.0.0.1:9", "--max-body", "much"), "limits.body_bytes: 'much' is not a size"),
        (("add", "ftp://host"), "'ftp://host' is no server"),
        (("add", "http://host:1", "--to", "http://router:1"), "operator's token of http://router:1 is needed"),
        (("add", "http://host:1", "--to", "router"), "--to router: not a URL"),
        (("http://127.0.0.1:9", "--port", "0"), "no server answers: http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_one_line(
    isthmus: Command, arguments: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ISTHMUS_TOKEN", raising=False)
    status, out, err = isthmus("route", *arguments)
    assert status and out == "" and says in err and err.count("\n") == 1
