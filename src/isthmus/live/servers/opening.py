"""Opens a vLLM node: starts or attaches to the server, checks that it fits, and makes the adapter beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from isthmus.config import Config
from isthmus.core.blocks import BlockNamer, KVLayout
from isthmus.core.errors import StartError
from isthmus.core.types import Sampling
from isthmus.facts import NodeFacts
from isthmus.live.cluster.launcher import LaunchSpec
from isthmus.live.cluster.process import NodeOptions, Opener, Runtime
from isthmus.live.servers.client import Client, EngineError, body_of
from isthmus.live.servers.kv_events import EventListener, Translator
from isthmus.live.servers.pages import Pages, misfit
from isthmus.live.servers.process import UNSEALED, AdapterProcess, ServedEngine
from isthmus.live.servers.server import Server, ServerSockets, own_folder

log = logging.getLogger(__name__)

OPEN_S = 10.0
"""How long the connector may take to open its session after its server answers."""
PROBE_S = 10.0
SHARED = "a server in another container shares this folder with its node (one volume)"


@contextlib.asynccontextmanager
async def opened(
    config: Config,
    spec: LaunchSpec,
    runtime: Runtime,
    *,
    sized: Callable[[int], tuple[NodeOptions, KVLayout]],
    revision_of: Callable[[Path], str],
    max_length: int,
    store_of: Callable[[ServedEngine, NodeFacts], Opener],
) -> AsyncIterator[AdapterProcess]:
    """Yields the adapter of a server, which is stopped afterwards. Raises StartError.

    `sized`: the node's options, and the layout of the model's KV but for its form, by tokens of a block: the server
    tells both; `revision_of`: names the weights in a folder; `max_length`: 0 for as much as the server's memory holds.
    """
    given, model = config.engine.vllm, Path(spec.model)
    with contextlib.ExitStack() as stack:
        where = os.path.expanduser(given.sockets or str(stack.enter_context(own_folder())))
        sockets = ServerSockets(where)
        if sockets.pages is not None and not sockets.pages.parent.is_dir():
            raise StartError(f"engine.vllm.sockets {where}: there is no such folder; {SHARED}")
        pages = Pages(sockets.pages) if sockets.pages is not None and given.transfer == "pool" else None
        if pages is not None:
            try:
                await pages.listen()
            except OSError as error:
                raise StartError(
                    f"engine.vllm.sockets {where}: cannot listen there: {error.strerror or error}"
                ) from None
        dtype = sized(config.engine.block_size)[1].dtype
        server = await Server.start(config, spec, dtype, max_length, sockets)
        try:
            await server.ready(config.limits.start_s)
            known = await _known(server.client, config)
            options, layout = sized(known.block_size)
            form, remark = await _form(known, server.client, pages, layout, model, revision_of)
            layout = msgspec.structs.replace(layout, form=form)
            length = known.max_length or max_length
            engine = ServedEngine(revision_of(model), layout, known.num_blocks, length, remark)
            await _probe(server.client, sockets, engine)
            if no_grammars := await _no_grammars(server.client):
                log.warning("%s: %s", options.facts.node, no_grammars)
                engine = replace(engine, no_grammars=no_grammars)
            if engine.num_blocks != options.facts.kv_blocks:
                log.info("%s: vLLM has %d blocks of KV memory", options.facts.node, engine.num_blocks)
            facts = msgspec.structs.replace(options.facts, kv_blocks=engine.num_blocks)
            options = replace(options, facts=facts)
            yield AdapterProcess(engine, options, runtime, server, sockets, pages, store_of(engine, facts))
        finally:
            await server.stop()
            if pages is not None:
                await pages.close()


async def _known(client: Client, config: Config) -> Told:
    """Returns the server's description of itself, whose first name for its model the client uses from then on. Raises
    StartError if it contradicts the configuration."""
    known = await told(client)
    client.model = known.models[0]
    engine = config.engine
    if "block_size" in engine.model_fields_set and known.block_size != engine.block_size:
        raise StartError(
            f"vLLM at {client.url} has blocks of {known.block_size} tokens, engine.block_size is {engine.block_size}: "
            "leave that out, or give the server's"
        )
    return known


async def _form(
    known: Told,
    client: Client,
    pages: Pages | None,
    layout: KVLayout,
    model: Path,
    revision_of: Callable[[Path], str],
) -> tuple[str, str]:
    """Returns the form of the server's KV, and a remark for operators. Raises StartError if connector and node do not
    fit."""
    if pages is None:
        return f"vllm{known.version}/nixl", f"vLLM {known.version} {UNSEALED}"
    try:
        opened = await asyncio.wait_for(asyncio.shield(pages.opened), OPEN_S)
    except TimeoutError:
        raise StartError(
            f"vLLM at {client.url} did not open {pages.path}: is isthmus-vllm installed where it runs, and is it "
            f"its KV connector, as the same user? {SHARED}"
        ) from None
    if reason := misfit(opened, msgspec.structs.replace(layout, form=opened.form)):
        raise StartError(f"vLLM at {client.url} and this node do not fit: {reason}")
    own = Path(opened.model)
    if own != model and not (own.is_dir() and revision_of(own) == revision_of(model)):
        raise StartError(
            f"vLLM at {client.url} serves {opened.model}, this node {model}: give both one folder, in containers at "
            "one path, or equal ones"
        )
    return opened.form, f"vLLM {known.version} with isthmus-vllm: KV is sealed"


@dataclass(frozen=True)
class Told:
    """A server's description of itself. `models`: all names of its model, then of adapters; `max_length`: 0 if
    unknown."""

    version: str
    models: tuple[str, ...]
    max_length: int
    num_blocks: int
    block_size: int


async def told(client: Client) -> Told:
    """Asks a server what it is. Raises StartError."""
    try:
        version = str(json.loads(await client.get("/version"))["version"])
        metrics = (await client.get("/metrics")).decode()
        served = json.loads(await client.get("/v1/models"))["data"]
        models = tuple([str(each["id"]) for each in served])
        if not models:
            raise ValueError("it serves no model")
        length = next((int(each["max_model_len"]) for each in served if each.get("max_model_len")), 0)
    except (EngineError, ValueError, KeyError, TypeError) as error:
        raise StartError(f"vLLM at {client.url} does not say what it is: {error}") from None
    info = next((line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    found = dict(re.findall(r'(\w+)="([^"]*)"', info))
    try:
        return Told(version, models, length, int(found["num_gpu_blocks"]), int(found["block_size"]))
    except (KeyError, ValueError):
        raise StartError(
            "vLLM's metrics do not say how much KV memory it has (vllm:cache_config_info)"
        ) from None


async def _probe(client: Client, sockets: ServerSockets, engine: ServedEngine) -> None:
    """Checks that the server computes, and that its KV events name a block of random tokens as this node does. Raises
    StartError."""
    size = engine.layout.block_size
    namer = BlockNamer(revision=engine.revision, layout=engine.layout)
    tokens = [1 + each % 200 for each in secrets.token_bytes(size + 1)]
    wanted, seen = namer.names(tokens)[0], asyncio.Event()
    translator = Translator(lambda salt, _: None if salt else namer, size)

    def heard(batch: bytes) -> None:
        if any(wanted in fact.stored for fact in translator.batch(batch)):
            seen.set()

    listener = EventListener(sockets.kv_events, sockets.replay, heard, lambda: None)
    task = asyncio.create_task(listener.run())
    try:
        await client.compute(f"probe-{os.getpid()}", body_of(Sampling(temperature=0), tokens, len(tokens), 1))
        await asyncio.wait_for(seen.wait(), PROBE_S)
    except EngineError as error:
        raise StartError(f"vLLM at {client.url} does not compute: {error}") from None
    except TimeoutError:
        hint = f"; {SHARED}" if sockets.pages is not None else ""
        raise StartError(
            f"vLLM at {client.url} tells no KV events at {sockets.kv_events}, or of other blocks than it computed{hint}"
        ) from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _no_grammars(client: Client) -> str:
    """Returns why the server follows no grammars, "" if it follows one that allows a single token."""
    wanted = secrets.randbelow(200)
    body = body_of(Sampling(temperature=0, grammar=f"start: <[{wanted}]>"), [1], 1, 1)
    refused = f"vLLM at {client.url} follows no grammars (response_format, forced tools): "
    try:
        answer = client.answer(f"probe-grammar-{os.getpid()}", body, None)
        found = [token.token async for tokens in answer for token in tokens]
    except EngineError as error:
        return refused + str(error)
    # With vLLM's reasoning parser answers are free up to the end of their reasoning, which the node does not know of.
    return "" if found == [wanted] else refused + "start it without --reasoning-parser"
