"""`isthmus route`: one endpoint before OpenAI-compatible servers that already run; and its servers, added and removed
while it runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from isthmus.cli.listed import RouteCommand
from isthmus.core.errors import ConfigError

if TYPE_CHECKING:
    from typer._click import Command, Context

    from isthmus.config import Config
    from isthmus.core.types import Role
    from isthmus.live.servers.router import Router

log = logging.getLogger(__name__)

START = "route"
LOOK_S = 2.0
"""How often the file is looked at."""
TOKEN_FILE = "operator.token"
ANSWER_S = 30.0
"""New servers, and names, are looked at before the answer."""


class _Verbs(TyperGroup):
    """`isthmus route`: starts a router, unless the first word is another verb."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        own = args[:1] and args[0] in self.commands and args[0] != START
        return super().parse_args(ctx, args if own else [START, *args])

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return None if name == START else name, command, rest


app = typer.Typer(cls=_Verbs, add_completion=False, rich_markup_mode=None)


@app.command(START, cls=RouteCommand)
def route(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL...",
            help="Servers: http://HOST:PORT, dns+http://NAME:PORT or k8s://NAMESPACE/LABEL=VALUE:PORT.",
        ),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL...", help="Servers with a KV connector that compute prompts alone."),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL...", help="Servers that go on with the KV of those.")
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(
            help="Prompts with at most so many uncached tokens stay at --decode servers; without, each goes where "
            "it costs least.",
            min=0,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Deployment file (YAML) with `servers`; its changes are followed.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    policy: Annotated[str | None, typer.Option(help="How requests are placed, e.g. least_loaded.")] = None,
    admission: Annotated[str | None, typer.Option(help="When requests are refused, e.g. early.")] = None,
    ttft_ms: Annotated[int | None, typer.Option(help="Limit of the time to the first token.", min=1)] = None,
    tbt_ms: Annotated[int | None, typer.Option(help="Limit of the time between tokens.", min=1)] = None,
    max_body: Annotated[str | None, typer.Option(help="Largest body of a request, e.g. 64MiB.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must show, also from ISTHMUS_API_KEY; may be repeated."),
    ] = None,
    server_key: Annotated[
        str | None,
        typer.Option(
            help="Key that the servers ask for, also from ISTHMUS_SERVER_KEY; without it clients' own are passed on."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Of the served model: folder, GGUF file or hub id. Caches are known by tokens then."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Keep what is known of caches in this file, for the next start.")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Longest wait for the first bytes of an answer, and between its bytes (600)."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write a flight recording (JSONL) here.")] = None,
) -> None:
    """One endpoint before servers that already run: requests go where their prompts are cached or soonest computed.

    `isthmus route add URL` and `isthmus route remove URL` change the servers of a router that runs.
    """
    from isthmus.cli.garbage import starting

    overrides = {
        "host": host,
        "port": port,
        "policy": policy,
        "scheduling.admission": admission,
        "slo.ttft_ms": ttft_ms,
        "slo.tbt_ms": tbt_ms,
        "limits.body_bytes": max_body,
        "limits.timeout_s": timeout_s,
        "record": str(record) if record else None,
    }
    with starting():
        servers = Servers.of(urls or [], prefill or [], decode or [])
        servers.check(threshold)
        run_router(
            config, overrides, api_key or [], servers, server_key, threshold, tokenizer=tokenizer, state=state
        )


class Servers(NamedTuple):
    """Entries of servers by what those do."""

    mixed: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    @classmethod
    def of(cls, *given: Sequence[str]) -> Servers:
        """Raises ConfigError for what is no entry."""
        from isthmus.config import server_entry

        try:
            return cls(*[tuple(dict.fromkeys(map(server_entry, each))) for each in given])
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def entries(self) -> tuple[str, ...]:
        return self.mixed + self.prefill + self.decode

    @property
    def roles(self) -> dict[str, Role]:
        from isthmus.core.types import DECODE, PREFILL

        return dict.fromkeys(self.prefill, PREFILL) | dict.fromkeys(self.decode, DECODE)

    def check(self, threshold: int | None) -> None:
        """Raises ConfigError where no KV could be handed over, or a server is named twice."""
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(f"--{one} needs --{other}: a prompt's KV goes from one to the other")
        if threshold is not None and not self.prefill:
            raise ConfigError("--threshold is for servers apart: give --prefill and --decode")
        twice = next((url for url in self.entries if self.entries.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice: a server computes prompts, decodes, or does both")


_To = Annotated[str, typer.Option(help="The router.")]
_Entries = Annotated[list[str], typer.Argument(metavar="URL...", help="As `isthmus route` takes them.")]


@app.command()
def add(urls: _Entries, to: _To = "http://127.0.0.1:8000") -> None:
    """Add servers to a router that runs."""
    _change(to, add=urls)


@app.command()
def remove(urls: _Entries, to: _To = "http://127.0.0.1:8000") -> None:
    """Remove servers from a router that runs; they end the requests that they have first."""
    _change(to, remove=urls)


def _change(to: str, **changes: list[str]) -> None:
    import msgspec

    from isthmus.cli.asking import ask, checked_url
    from isthmus.config import server_entry
    from isthmus.core.errors import UnavailableError

    base = checked_url("--to", to)
    try:
        body = msgspec.json.encode({kind: list(map(server_entry, urls)) for kind, urls in changes.items()})
    except ValueError as error:
        raise ConfigError(str(error)) from None
    who, keyed = "is `isthmus route` running there? (--to)", "set ISTHMUS_TOKEN to the router's"
    answer = ask(base, "/isthmus/servers", _token_for(base), answer_s=ANSWER_S, who=who, keyed=keyed, body=body)
    try:
        lines = msgspec.json.decode(answer, type=dict[str, list[str]])["servers"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise UnavailableError(f"{base} answers what no router does; {who}") from None
    for line in lines:
        print(line)


def _token_for(base: str) -> str:
    """The operator's token: the environment's; for a router of this machine and user, else, the one that it keeps."""
    from urllib.parse import urlsplit

    from isthmus.config import cache_dir, cluster_token
    from isthmus.live.cluster.joining import is_loopback
    from isthmus.live.cluster.private import kept

    found, path = cluster_token(), cache_dir() / TOKEN_FILE
    if found is None and is_loopback(urlsplit(base).hostname or "") and path.exists():
        return kept(path, bytes, "the operator's token").decode()
    if found is None:
        raise ConfigError(f"the operator's token of {base} is needed: set ISTHMUS_TOKEN to the router's")
    return found


def _operators_token(config: Config) -> str | None:
    """The token that opens the operator's path: the file's or the environment's, else one of this user's on this
    machine. None where none can be kept."""
    from isthmus.config import cache_dir
    from isthmus.live.cluster.private import kept

    if config.token is not None:
        return config.token
    path = cache_dir() / TOKEN_FILE
    try:
        return kept(path, secrets.token_urlsafe().encode, "the operator's token").decode()
    except ConfigError as error:
        log.warning("servers are added and removed by the file alone, or with ISTHMUS_TOKEN set: %s", error)
        return None


def run_router(
    path: Path | None,
    overrides: dict[str, Any],
    keys: Sequence[str],
    servers: Servers = Servers(),  # noqa: B008 (a value)
    server_key: str | None = None,
    threshold: int | None = None,
    *,
    tokenizer: str | None = None,
    state: Path | None = None,
) -> None:
    """Serves until a signal. `path`: the file; `overrides`: what flags say; `keys`: of clients; `servers`: beside those
    of the file; `threshold`: as `split.divided` takes it; `tokenizer`: of the served model; `state`: file of what is
    known of caches. Raises ConfigError, StartError."""
    import asyncio

    import uvloop

    from isthmus.config import cluster_token, load_config, server_key_of, with_keys

    overrides = overrides | {"token": cluster_token()}
    of_file = load_config(path, overrides).servers
    given = servers.entries
    entries = list(dict.fromkeys([*given, *of_file]))
    if not entries:
        where = f"{path}: servers: is missing" if path else "no servers are given"
        raise ConfigError(f"{where}; write isthmus route http://HOST:PORT, or servers in the file of --config")
    config = with_keys(load_config(path, overrides | {"servers": entries}), keys)
    file = None if path is None else _File(path, overrides, of_file, given)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_route(config, file, server_key_of(server_key), servers.roles, threshold, tokenizer, state))


async def _route(
    config: Config,
    file: _File | None,
    server_key: str | None,
    roles: dict[str, Role],
    threshold: int | None,
    tokenizer: str | None,
    state: Path | None,
) -> None:
    """Serves until a signal."""
    import asyncio

    from isthmus.cli.garbage import started
    from isthmus.cli.models import find_tokenizer
    from isthmus.cli.serve import common_settings, http_limits, say_if_open, stop_on_signals
    from isthmus.core.conductor.events import RECORDING_FORMAT
    from isthmus.facts import rules_of
    from isthmus.live.cluster.recorder import LiveRecorder, Recorder, RecordingHeader, opaque
    from isthmus.live.gateway.passing import create_passing_app
    from isthmus.live.gateway.prompt_tokens import PromptTokens
    from isthmus.live.gateway.server import Certificate, bind, serve_http
    from isthmus.live.messenger import address_of
    from isthmus.live.servers.router import Router
    from isthmus.live.servers.split import divided
    from isthmus.live.servers.state_file import StateFile

    began = time.monotonic()
    rules = divided(rules_of(config), threshold) if roles else rules_of(config)
    https = config.https
    certificate = Certificate(https.certificate, str(https.key)) if https.certificate is not None else None

    def new_recorder(number: int) -> Recorder:
        """Servers of other models have a conductor, and so a file, of their own."""
        path = Path(str(config.record))
        header = RecordingHeader(RECORDING_FORMAT, rules)
        return LiveRecorder(path.with_suffix(f".{number}{path.suffix}") if number else path, header)

    limits = http_limits(config, len(config.servers))
    num_each = 3 if roles else 2  # a client's connection, and one to a server of each leg
    token = _operators_token(config)
    settings = replace(
        common_settings(config),
        http=replace(limits, connections=max(1, limits.connections // num_each)),
        operator=hashlib.sha256(token.encode()).digest() if token else None,
    )
    prompt_tokens = PromptTokens(find_tokenizer(tokenizer), settings) if tokenizer else None
    kept = StateFile(state) if state is not None else None
    if kept is not None:
        kept.load()
    router = Router(
        rules,
        config.servers,
        rejoin_s=config.limits.rejoin_s,
        roles=roles,
        key=server_key,
        new_recorder=new_recorder if config.record else None,
        alias_of=partial(opaque, secret=secrets.token_hex()),
        timeout_s=config.limits.timeout_s,
        samples=prompt_tokens.samples if prompt_tokens is not None else None,
        state=kept,
    )
    bound = bind(config.host, config.port)
    say_if_open(config, bound.getsockname())
    stop, at_once = stop_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(bound.close)
        if prompt_tokens is not None:
            stack.callback(prompt_tokens.close)
            prompt_tokens.open()
        await stack.enter_async_context(router.run())
        started()
        lines = router.lines()
        scheme = "https" if certificate else "http"
        url = f"{scheme}://{address_of(config.host, bound.getsockname()[1])}"
        print(f"Isthmus routes {url} to {len(lines)} servers (ready in {time.monotonic() - began:.1f} s)")
        for line in lines:
            print(f"  {line}")
        print(flush=True)
        app = create_passing_app(router, settings, prompt_tokens)
        serving = partial(serve_http, drain_s=config.limits.drain_s, at_once=at_once, certificate=certificate)
        async with asyncio.TaskGroup() as group:
            following = group.create_task(file.follow(router)) if file is not None else None
            await serving(app, bound, stop)
            if following is not None:
                following.cancel()


class _File:
    """The servers that a file names, followed while the file changes. `overrides`: as it is read; `given`: servers that
    the command line names, and the file does not remove."""

    def __init__(
        self, path: Path, overrides: dict[str, Any], servers: Sequence[str], given: Sequence[str]
    ) -> None:
        self._path, self._overrides, self._servers, self._given = path, overrides, servers, given
        self._seen, self._first = self._stamp(), self._others(self._read())

    async def follow(self, router: Router) -> None:
        """Reads the file when it changes, and on SIGHUP."""
        import asyncio
        import signal

        again, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, again.set)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(again.wait(), LOOK_S)
                self.look(router, is_asked=again.is_set())
                again.clear()
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def look(self, router: Router, *, is_asked: bool) -> None:
        """Reads the file if it has changed or `is_asked`, and has the router follow it."""
        stamp = self._stamp()
        if stamp is None or (stamp == self._seen and not is_asked):
            return
        self._seen = stamp
        try:
            config = self._read()
            if not config.servers and self._servers:
                raise ConfigError(f"{self._path}: servers: none are there")
        except ConfigError as error:
            log.warning("the servers stay as they are: %s", error)
            return
        if self._others(config) != self._first:
            log.warning("%s: what is not of servers takes effect when the router is started again", self._path)
        new = [entry for entry in config.servers if entry not in self._servers]
        old = [entry for entry in self._servers if entry not in (*config.servers, *self._given)]
        self._servers = config.servers
        log.warning("%s: adds %s; removes %s", self._path, ", ".join(new) or "none", ", ".join(old) or "none")
        router.change(add=new, remove=[entry for entry in old if entry in router.entries])

    def _read(self) -> Config:
        from isthmus.config import load_config

        return load_config(self._path, self._overrides)

    def _others(self, config: Config) -> dict[str, Any]:
        return {option: value for option, value in config if option != "servers"}

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the file; None while it is not there."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size
