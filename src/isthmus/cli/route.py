"""`isthmus route`: one endpoint before OpenAI-compatible servers that already run."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.core.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.config import Config


def route(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Servers, each http://HOST:PORT.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    policy: Annotated[str, typer.Option(help="How requests are placed, e.g. least_loaded.")] = "isthmus",
    admission: Annotated[str, typer.Option(help="When requests are refused, e.g. early.")] = "none",
    ttft_ms: Annotated[int | None, typer.Option(help="Limit of the time to the first token.", min=1)] = None,
    tbt_ms: Annotated[int | None, typer.Option(help="Limit of the time between tokens.", min=1)] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must show, also from ISTHMUS_API_KEY; may be repeated."),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(help="Key that the servers ask for; without it clients' own keys are passed on."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write a flight recording (JSONL) here.")] = None,
) -> None:
    """One endpoint before servers that already run: requests go where their prompts are cached or soonest computed."""
    import asyncio

    import uvloop

    from isthmus.cli.garbage import starting
    from isthmus.config import load_config, with_keys

    overrides = {
        "host": host,
        "port": port,
        "policy": policy,
        "scheduling.admission": admission,
        "slo.ttft_ms": ttft_ms,
        "slo.tbt_ms": tbt_ms,
        "record": str(record) if record else None,
    }
    servers = list(dict.fromkeys(map(_url, urls)))
    with starting():
        config = with_keys(load_config(None, overrides), api_key or [])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_route(config, servers, server_key))


def _url(given: str) -> str:
    """A server's URL without its path. Raises ConfigError."""
    text = given if "://" in given else f"http://{given}"
    found = re.fullmatch(r"(https?://(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?)(?:/v1)?/?", text)
    if found is None:
        raise ConfigError(f"{given!r} is no server: write http://HOST:PORT")
    return found[1]


async def _route(config: Config, servers: list[str], server_key: str | None) -> None:
    """Serves until a signal."""

    from isthmus.cli.garbage import started
    from isthmus.cli.serve import http_limits, say_if_open, stop_on_signals
    from isthmus.core.conductor.events import RECORDING_FORMAT
    from isthmus.facts import rules_of
    from isthmus.live.cluster.recorder import LiveRecorder, Recorder, RecordingHeader, opaque
    from isthmus.live.gateway.passing import create_passing_app
    from isthmus.live.gateway.server import bind, serve_http
    from isthmus.live.gateway.settings import ApiKey, GatewaySettings
    from isthmus.live.messenger import address_of
    from isthmus.live.servers.router import Router

    began = time.monotonic()
    rules = rules_of(config)

    def new_recorder(number: int) -> Recorder:
        """Servers of other models have a conductor, and so a file, of their own."""
        path = Path(str(config.record))
        header = RecordingHeader(RECORDING_FORMAT, rules)
        return LiveRecorder(path.with_suffix(f".{number}{path.suffix}") if number else path, header)

    router = Router(
        rules,
        servers,
        rejoin_s=config.limits.rejoin_s,
        key=server_key,
        new_recorder=new_recorder if config.record else None,
        alias_of=partial(opaque, secret=secrets.token_hex()),
    )
    limits = http_limits(config, len(servers))  # each client's connection has one to a server
    settings = GatewaySettings(
        keys=tuple(ApiKey(key.tenant, bytes.fromhex(key.sha256)) for key in config.auth.keys),
        origins=config.cors.origins,
        max_body_bytes=config.limits.body_bytes,
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        http=replace(limits, connections=max(1, limits.connections // 2)),
    )
    bound = bind(config.host, config.port)
    say_if_open(config, bound.getsockname())
    stop, at_once = stop_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(bound.close)
        await stack.enter_async_context(router.run())
        started()
        url = f"http://{address_of(config.host, bound.getsockname()[1])}"
        print(f"Isthmus routes {url} to {len(servers)} servers (ready in {time.monotonic() - began:.1f} s)")
        for line in router.lines():
            print(f"  {line}")
        print(flush=True)
        app = create_passing_app(router, settings)
        await serve_http(app, bound, stop, drain_s=config.limits.drain_s, at_once=at_once)
