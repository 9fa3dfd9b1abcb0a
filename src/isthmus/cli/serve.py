"""`isthmus serve`: a whole cluster on this machine behind one OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.garbage import started, starting

if TYPE_CHECKING:
    import asyncio

    from isthmus.cli.engines import Served
    from isthmus.config import Config, TenantConfig
    from isthmus.live.cluster.launcher import Launcher
    from isthmus.live.cluster.local import LocalCluster
    from isthmus.live.gateway.settings import GatewaySettings, HttpLimits, TenantLimits
    from isthmus.live.gateway.tokenizer import GatewayTokenizer

FEW_CONNECTIONS = 1024
"""Below this limit of HTTP connections the operator is told the reason."""


def serve(
    config: Annotated[Path | None, typer.Option(help="Deployment file (YAML).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, GGUF file or hub id; default: SmolLM2-135M-Instruct.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use for the model; several: A,B.")
    ] = None,
    tool_format: Annotated[
        str | None, typer.Option(help="How the model writes calls of tools, e.g. hermes; default: auto.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill nodes.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode nodes.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Number of mixed nodes.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="torch; vllm: servers beside nodes; emulated: its speed, no model.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Accelerator of the cost model, e.g. h200.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Accelerators of each node; without vLLM and Ray, of its cost alone."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="How requests are placed, e.g. least_loaded.")] = None,
    admission: Annotated[str | None, typer.Option(help="When requests are refused, e.g. early.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; default: the model's.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each node.")] = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens computed in one iteration.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV memory of each node, e.g. 512MiB.")] = None,
    cache: Annotated[
        str | None, typer.Option(help="DRAM of each node for cached KV; without --config as much as KV memory.")
    ] = None,
    ssd: Annotated[str | None, typer.Option(help="SSD of each node for cached KV, in --cache-folder.")] = None,
    cache_folder: Annotated[Path | None, typer.Option(help="Where nodes keep cached KV on SSD.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest prompt and answer, in tokens.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that clients must show, also from ISTHMUS_API_KEY; may be repeated."),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
    record: Annotated[Path | None, typer.Option(help="Write a flight recording (JSONL) here.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS between head and nodes, wherever they are.")
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Nodes on the machines of a Ray cluster, in place of this one.")
    ] = False,
) -> None:
    """Serve a model: gateway and conductor here, each prefill, decode or mixed node a process of its own."""
    overrides: dict[str, Any] = {
        "model": model,
        "served_model_name": served_model_name,
        "tool_format": tool_format,
        "host": host,
        "port": port,
        "engine.kind": engine,
        "engine.hardware": hardware,
        "engine.gpus": gpus,
        "policy": policy,
        "scheduling.admission": admission,
        "engine.dtype": dtype,
        "engine.threads": threads,
        "engine.token_budget": token_budget,
        "engine.kv_memory": kv_memory,
        "cache.dram": cache if cache is not None or config is not None else kv_memory or "1GiB",
        "cache.ssd": ssd,
        "cache.folder": str(cache_folder) if cache_folder else None,
        "engine.max_length": max_length,
        "https.certificate": str(tls_certificate) if tls_certificate else None,
        "https.key": str(tls_key) if tls_key else None,
        "record": str(record) if record else None,
        "tls.mode": "none" if insecure else None,
        "placement": "ray" if ray else None,
        **_role_overrides(prefill, decode, mixed),
    }
    with starting():
        _run(config, overrides, api_key or [])


def _run(config: Path | None, overrides: dict[str, Any], keys: list[str]) -> None:
    import asyncio

    from isthmus.cli.route import run_router
    from isthmus.config import cluster_token, load_config, with_keys
    from isthmus.facts import at_home, rooted, shaped

    overrides["token"] = cluster_token()
    read = load_config(config, overrides)
    if read.servers:
        run_router(config, overrides, keys)
        return
    given = at_home(read, config.parent if config else Path())
    if given.placement == "ray":
        given = rooted(given, Path.cwd())
    settings, why = shaped(with_keys(given, keys), len(os.sched_getaffinity(0)))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(settings, why))


def _role_overrides(prefill: int | None, decode: int | None, mixed: int | None) -> dict[str, Any]:
    """`--mixed N` alone means N mixed nodes and nothing else. What else a file says of a role stays."""
    if mixed is not None and prefill is None and decode is None:
        prefill = decode = 0
    return {"roles.prefill.count": prefill, "roles.decode.count": decode, "roles.mixed.count": mixed}


def _loop_factory() -> Any:
    import uvloop

    return uvloop.new_event_loop


async def _serve(config: Config, why: str) -> None:
    """Serves until a signal. `why`: the reason for default nodes, "" if the user named nodes."""
    import asyncio

    from isthmus.live.cluster.launcher import launcher_of
    from isthmus.live.gateway.server import Certificate, bind, serve_http
    from isthmus.live.messenger import address_of

    began = time.monotonic()
    files = config.https
    certificate = Certificate(files.certificate, str(files.key)) if files.certificate is not None else None
    cluster, app = assemble(config, launcher_of(config))
    bound = bind(config.host, config.port)
    say_if_open(config, bound.getsockname())
    stop, at_once = stop_on_signals()
    async with cluster.run():
        started()
        if cluster.invitation:
            print(f"isthmus: nodes of other machines join with --join {cluster.invitation}", flush=True)
        say_if_plain(config, cluster.join_host)
        serving = serve_http(
            app, bound, stop, drain_s=config.limits.drain_s, at_once=at_once, certificate=certificate
        )
        http = asyncio.create_task(serving)
        ready = asyncio.create_task(cluster.wait_ready())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ready, http, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                url = (
                    f"{'https' if certificate else 'http'}://{address_of(config.host, bound.getsockname()[1])}"
                )
                if config.engine.kind == "emulated":
                    print(
                        "isthmus: the engine is emulated: its tokens tell wrong bytes, not words",
                        file=sys.stderr,
                    )
                nodes = [str(node) for node in cluster.head.nodes()]
                took_s = time.monotonic() - began
                _announce(url, cluster.head.card.name, nodes, why, took_s, keyed=bool(config.auth.keys))
            await http
        finally:
            for task in (ready, stopped, http):
                task.cancel()
            await asyncio.gather(ready, stopped, http, return_exceptions=True)


def assemble(config: Config, launcher: Launcher) -> tuple[LocalCluster, Any]:
    """The cluster, not started yet, and the gateway's app before it. Raises ConfigError, ModelError or StartError."""
    from isthmus.cli.engines import (
        as_computed,
        block_size_of,
        check_installed,
        grammar_limits,
        host_bytes,
        kv_layout,
        served_model,
    )
    from isthmus.cli.models import model_of
    from isthmus.core.types import ModelCard
    from isthmus.facts import clusters_of, nodes_of, places_of
    from isthmus.live.cluster.local import JoinedCluster, LocalCluster, check_joining
    from isthmus.live.gateway.app import create_app
    from isthmus.live.gateway.preparing import Preparing
    from isthmus.live.gateway.tokenizer import GatewayTokenizer

    places_of(config)  # refuses impossible nodes before a model is looked for
    check_installed(config)
    joins = config.placement == "join"
    if joins:
        check_joining(config)
    folder, name = model_of(config)
    config = as_computed(config, folder)
    nodes = nodes_of(config, block_size_of(config), model=folder, layout=kv_layout(config, folder))
    own = {cluster.name: cluster.config for cluster in clusters_of(config)}
    if not joins:
        num_bytes = {facts.node: host_bytes(own[facts.cluster], folder, facts) for facts in nodes}
        launcher.prepare(config, folder.absolute(), num_bytes)
    model = served_model(config, folder, nodes)
    length = _max_length(config, model)
    name, *aliases = config.served_model_name.split(",") if config.served_model_name else [name]
    card = ModelCard(
        name=name,
        aliases=tuple(aliases),
        max_length=length,
        vocab_size=model.vocab_size,
        created_s=int(time.time()),
        node_length=model.node_tokens if model.node_tokens < length else 0,
        no_reuse=model.no_reuse,
    )
    tokenizer = GatewayTokenizer.load(model.tokenizer)
    cluster = (JoinedCluster if joins else LocalCluster)(config, card, launcher)
    settings = replace(
        common_settings(config),
        tool_format=config.tool_format,
        max_depth=config.limits.json_depth,
        max_messages=config.limits.messages,
        max_tools=config.limits.tools,
        max_preparing=config.limits.preparing,
        prepare_s=config.limits.prepare_s,
        prepare_bytes=config.limits.prepare_memory,
        grammar=grammar_limits(config),
        reuse=config.reuse.default,
        tenant_reuse=config.reuse.tenants,
        http=http_limits(config, len(nodes)),
    )
    say_if_exact(config, card.no_reuse)
    say_if_mute(tokenizer)
    preparing = Preparing(card, tokenizer, settings, model.tokenizer)
    return cluster, create_app(cluster.head, tokenizer, settings, preparing)


def common_settings(config: Config) -> GatewaySettings:
    """Settings of every gateway: before nodes of our own, and before servers that run already."""
    from isthmus.facts import shares_of
    from isthmus.live.gateway.settings import ApiKey, GatewaySettings

    return GatewaySettings(
        keys=tuple(ApiKey(key.tenant, bytes.fromhex(key.sha256)) for key in config.auth.keys),
        origins=config.cors.origins,
        max_body_bytes=config.limits.body_bytes,
        ttft_ms=config.slo.ttft_ms,
        tbt_ms=config.slo.tbt_ms,
        tenant_limits={name: _limits(config.auth.of(name)) for name in config.auth.tenants},
        tenant_default=_limits(config.auth.default),
        shares=shares_of(config),
        names_tenants=config.auth.metrics == "tenants",
    )


def http_limits(config: Config, num_nodes: int) -> HttpLimits:
    """Raises StartError when the descriptor limit leaves too few connections."""
    from isthmus.live.gateway.server import connections_within, raise_descriptors
    from isthmus.live.gateway.settings import HttpLimits

    limits, descriptors = config.limits, raise_descriptors()
    connections = connections_within(descriptors, num_nodes, limits.connections)
    if limits.connections is None and connections < FEW_CONNECTIONS:
        print(
            f"isthmus: {connections} HTTP connections at most: there are {descriptors} descriptors (ulimit -n), of "
            "which nodes and files need the rest",
            file=sys.stderr,
        )
    return HttpLimits(
        header_bytes=limits.header_bytes,
        headers=limits.headers,
        header_s=limits.header_s,
        body_s=limits.body_s,
        bodies=limits.bodies,
        connections=connections,
    )


def _limits(tenant: TenantConfig) -> TenantLimits:
    from isthmus.live.gateway.settings import TenantLimits

    return TenantLimits(tenant.requests_per_s, tenant.tokens_per_s, tenant.burst_s, tenant.concurrent)


def _max_length(config: Config, model: Served) -> int:
    """What the model can read, the operator allows and the nodes' KV memory holds, in tokens."""
    fits = model.kv_tokens
    allowed = min(model.max_length, config.engine.max_length or model.max_length)
    if 0 < fits < allowed:
        print(
            f"isthmus: the KV memory holds {fits} tokens of the {allowed} the model could read: "
            "longer requests are refused (engine.kv_memory)",
            file=sys.stderr,
        )
    return min(allowed, fits) or allowed


def say_if_exact(config: Config, why: str) -> None:
    """Warns once, at the start, that `reuse` has no effect. `why`: `ModelCard.no_reuse`."""
    from isthmus.core.types import Reuse

    if why and {config.reuse.default, *config.reuse.tenants.values()} != {Reuse.EXACT}:
        print(f"isthmus: reuse stays exact, whatever the section reuse says: {why}", file=sys.stderr)


def say_if_mute(tokenizer: GatewayTokenizer) -> None:
    """Warns of a chat template that drops user messages. Its output may depend on the request, so none is refused."""
    if tokenizer.template and not tokenizer.template.shows_users:
        print(
            "isthmus: the chat template of this model shows nothing of what users say: chat prompts may be without it",
            file=sys.stderr,
        )


def say_if_open(config: Config, bound: tuple[Any, ...]) -> None:
    """Warns of a server without API keys beyond loopback. `bound`: the socket's name."""
    from ipaddress import ip_address

    if config.auth.keys or ip_address(bound[0]).is_loopback:
        return
    _say_in_red(
        f"isthmus: whoever reaches {bound[0]} port {bound[1]} can use this server: there are no API keys "
        "(ISTHMUS_API_KEY, or auth.keys in the file)"
    )


def say_if_plain(config: Config, host: str) -> None:
    """Warns of sessions without TLS if other machines reach `host`, where nodes join."""
    from isthmus.live.cluster.joining import is_loopback

    if config.tls.mode == "none" and not is_loopback(host):
        _say_in_red(
            "isthmus: insecure: whoever is on the network between nodes can read all prompts, answers and KV, and "
            f"change them: sessions at {host} have no TLS (--insecure, or tls.mode: none)"
        )


def _say_in_red(line: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(line, style="bold red", highlight=False, markup=False)


def stop_on_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """The first SIGTERM or Ctrl-C drains; a second one ends all answers at once; a third one waits for nothing."""
    import asyncio

    stop, at_once, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        if at_once.is_set():
            raise KeyboardInterrupt
        if stop.is_set():
            at_once.set()
            return
        stop.set()
        print("stopping: running answers are finished first; press Ctrl-C again to end now", file=sys.stderr)

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal)
    return stop, at_once


def _announce(url: str, model: str, nodes: list[str], why: str, seconds: float, *, keyed: bool) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": asked, "temperature": 0})
    print(f"Isthmus serves {model} at {url} with {', '.join(nodes)} (ready in {seconds:.1f} s)")
    print(f"{why}\n" if why else "")
    print("Try:")
    headers = "-H 'Content-Type: application/json'" + ' -H "Authorization: Bearer $ISTHMUS_API_KEY"' * keyed
    print(f"  curl {url}/v1/chat/completions {headers} -d '{body}'\n", flush=True)
