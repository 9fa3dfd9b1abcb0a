"""`isthmus node`: one node process of a running cluster."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from isthmus.cli.garbage import started, starting
from isthmus.core.errors import ConfigError, IsthmusError
from isthmus.core.types import NodeId, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from isthmus.config import Config
    from isthmus.core.blocks import KVLayout
    from isthmus.facts import NodeFacts
    from isthmus.live.cluster.launcher import LaunchSpec
    from isthmus.live.cluster.process import EngineProcess, MemberProcess, NodeOptions, Runtime

SWITCH_S = 0.0002
CANCELLED = "ended by a signal"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def node(
    role: Annotated[Role | None, typer.Option(help="What this node does.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Where it stands, if the config names clusters.")] = None,
    join: Annotated[
        str | None, typer.Option(help="isthmus://HOST:PORT#TOKEN, as serve prints it; HOST:PORT without TLS.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique name; default: role, host and process id.")] = None,
    config: Annotated[Path | None, typer.Option(help="The deployment file of the cluster.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, GGUF file or hub id.")] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address where other nodes reach this one; default: that from which it reaches the head."
        ),
    ] = None,
    launched: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Add one node to a running cluster. Where --join does not tell the cluster's token, ISTHMUS_TOKEN or the config
    does."""
    if launched:
        _run_launched()
        return
    from isthmus.live.cluster.joining import FORM, JoinToken, reached_at
    from isthmus.live.cluster.launcher import LaunchSpec

    if role is None or join is None:
        raise ConfigError(f"isthmus node needs --role prefill|decode|mixed|attention and --join {FORM}")
    from isthmus.config import cluster_token, load_config
    from isthmus.facts import at_home

    try:
        joining = JoinToken.parse(join)
        if joining.pin:
            from isthmus.live.cluster.authority import key_of

            key_of(joining.pin)
    except ValueError as error:
        raise ConfigError(f"--join: {error}") from None

    settings = at_home(load_config(config, {"model": model}), config.parent if config else Path())
    settings = _in_cluster(settings, cluster)
    if getattr(settings.roles, role).pipeline > 1:
        raise ConfigError(
            f"roles.{role}.pipeline: `isthmus serve` starts pipeline groups; give a config without it for a single node"
        )
    if joining.pin and settings.tls.certificate is not None:
        raise ConfigError(
            "tls: --join with a token takes the place of certificate, key and authority; give one"
        )
    token = joining.secret or cluster_token() or settings.token
    if token is None:
        raise ConfigError(
            f"the cluster's token is needed: set ISTHMUS_TOKEN, token in the config file, or --join {FORM}"
        )
    if name is None and settings.cache.ssd:
        raise ConfigError(
            "isthmus node needs --name where cache.ssd is given: by it the blocks are found again"
        )
    if name is not None and not NAME.fullmatch(name):
        raise ConfigError(f"--name: letters, digits, '.', '_' and '-', not {name!r}")
    from isthmus.cli.engines import as_computed
    from isthmus.cli.models import model_of

    folder, _ = model_of(settings)
    host = reached_at(host, joining.address, settings.limits.start_s)
    spec = LaunchSpec(
        node=NodeId(name or "-".join(filter(None, [cluster, role, os.uname().nodename, str(os.getpid())]))),
        role=role,
        join=joining.address,
        token=token,
        pin=joining.pin,
        model=str(folder),
        threads=settings.engine.threads or len(os.sched_getaffinity(0)),
        config=as_computed(settings, folder).model_dump_json(exclude_unset=True),
        cluster=cluster or "",
        host=host,
    )
    _run_alone(spec, settings.limits.start_s)


def _run_alone(spec: LaunchSpec, join_s: float) -> None:
    """Runs a node that a person or a service manager started, who restarts it after an error, as when its head died."""
    from isthmus.core.errors import StartError
    from isthmus.live.cluster.process import STOPPED

    # The first process of a container has no default handler of SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    reason = _run(spec, join_s, watch_stdin=False)
    if reason not in (STOPPED, CANCELLED):
        raise StartError(f"{spec.node}: {reason}")
    print(f"{spec.node}: {reason}", file=sys.stderr)


def _in_cluster(config: Config, name: str | None) -> Config:
    """The configuration of one cluster. Raises ConfigError when it is not named right."""
    from isthmus.facts import clusters_of

    found = {cluster.name: cluster.config for cluster in clusters_of(config)}
    if (name or "") not in found:
        known = ", ".join(filter(None, found))
        raise ConfigError(
            f"--cluster: give one of {known}" if known else "--cluster: the config names no clusters"
        )
    return found[name or ""]


def _run_launched() -> None:
    """A child of the launcher: its specification on standard input, trouble on standard output."""
    with starting():
        from isthmus.live.cluster.launcher import LaunchSpec, Trouble

        line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(1)  # the launcher died before it sent the specification
    try:
        _run(msgspec.json.decode(line, type=LaunchSpec), 0, watch_stdin=True)
    except IsthmusError as error:
        sys.stdout.buffer.write(msgspec.json.encode(Trouble(str(error))) + b"\n")
        sys.stdout.flush()
        sys.exit(error.exit_code)


def _run(spec: LaunchSpec, join_s: float, *, watch_stdin: bool) -> str:
    # The worker thread gives the interpreter up only for an instant at a time; with Python's default of 5 ms
    # the event loop would send tokens in bursts.
    sys.setswitchinterval(SWITCH_S)
    import asyncio

    import uvloop

    with starting(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(spec, join_s, watch_stdin=watch_stdin))


@contextlib.asynccontextmanager
async def _opened(spec: LaunchSpec, join_s: float) -> AsyncIterator[MemberProcess]:
    """The node's process; beside a vLLM server, as soon as that answers."""
    from isthmus.config import Config

    config = Config.model_validate_json(spec.config)
    if config.engine.kind != "vllm":
        yield process_of(spec, join_s=join_s)
        return
    from isthmus.cli.engines import kv_layout, sampled_revision, served_length, store_opener
    from isthmus.facts import for_role
    from isthmus.live.servers.opening import opened

    folder = Path(spec.model)

    def sized(block_size: int) -> tuple[NodeOptions, KVLayout]:
        """The node and its KV, with blocks of this size."""
        engine = config.engine.model_copy(update={"block_size": block_size})
        own = config.model_copy(update={"engine": engine})
        layout = kv_layout(own, folder)
        assert layout is not None
        return _options_of(spec, own, _facts_of(spec, own), join_s), layout

    facts = _facts_of(spec, config)
    async with opened(
        for_role(config, facts.role),
        spec,
        _runtime_of(spec, config),
        sized=sized,
        revision_of=sampled_revision,
        max_length=served_length(config, folder, facts),
        store_of=lambda engine, facts: store_opener(
            config, engine, engine.layout, spec.node, facts, ran_before=spec.start > 1
        ),
    ) as process:
        yield process


def process_of(spec: LaunchSpec, *, join_s: float = 0) -> EngineProcess:
    """The node's process with its engine and store, ready to run. `join_s`: how long it waits for its head.
    Raises ModelError, ConfigError or StartError."""
    from isthmus.cli.engines import open_engine, store_opener
    from isthmus.config import Config
    from isthmus.live.cluster.node import NodeProcess
    from isthmus.live.cluster.recorder import node_recorder
    from isthmus.live.cluster.stage import StageNode

    config = Config.model_validate_json(spec.config)
    facts = _facts_of(spec, config)
    engine = open_engine(config, Path(spec.model), spec.threads, facts, stage=spec.stage)
    options = _options_of(spec, config, facts, join_s)
    folder_name = f"{spec.node}.{spec.stage}" if spec.stage else spec.node
    store_of = store_opener(config, engine, engine.memory.layout, folder_name, facts, ran_before=spec.start > 1)
    runtime = _runtime_of(spec, config)
    if spec.stage:
        return StageNode(engine, options, runtime, store_of)
    tape = None
    if config.record:
        tape = node_recorder(Path(config.record), facts, config.limits.transfer_s, spec.start)
    return NodeProcess(engine, options, runtime, store_of, tape)


def _runtime_of(spec: LaunchSpec, config: Config) -> Runtime:
    from isthmus.live.cluster.process import Runtime
    from isthmus.live.peers.sessions import network_of

    if not spec.pin:
        return Runtime(network_of(config, spec.token))
    from isthmus.live.cluster.authority import NodeCredentials

    credentials = NodeCredentials(spec.pin, spec.node)
    return Runtime(network_of(config, spec.token, credentials), credentials=credentials)


def _facts_of(spec: LaunchSpec, config: Config) -> NodeFacts:
    from isthmus.cli.engines import node_facts
    from isthmus.facts import ClusterPlace

    return node_facts(ClusterPlace(spec.cluster, config), spec.role, Path(spec.model), spec.node)


def _options_of(spec: LaunchSpec, config: Config, facts: NodeFacts, join_s: float) -> NodeOptions:
    from isthmus.live.cluster.process import NodeOptions

    return NodeOptions(
        facts=facts,
        join=spec.join,
        transfer_s=config.limits.transfer_s,
        host=spec.host,
        shares_memory=config.cache.share == "host" and not spec.cluster,
        link_s=config.limits.link_s,
        stage=spec.stage,
        join_s=join_s,
    )


async def _serve(spec: LaunchSpec, join_s: float, *, watch_stdin: bool) -> str:
    """Runs a node; with `watch_stdin` it ends when the launcher's pipe closes, else with SIGTERM."""
    import asyncio

    task = asyncio.current_task()
    assert task is not None

    if watch_stdin:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        watch = asyncio.create_task(reader.read())
        watch.add_done_callback(lambda _: task.cancel())
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with _opened(spec, join_s) as process:
            started()
            return str(await process.run())
    return CANCELLED
