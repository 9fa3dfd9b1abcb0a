"""A whole cluster inside this process: head, gateway and nodes as `isthmus serve` puts them together, on real sockets
and with real threads, but all in one event loop. No process is started, so none has to import anything.

What is about processes (how they start and end, what they inherit, what dies with them) is tested with `served.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import uvloop

from isthmus.cli.node import SWITCH_S, process_of
from isthmus.cli.serve import assemble
from isthmus.config import Config, load_config
from isthmus.core.types import BlockName, Tier
from isthmus.live.cluster.head import Head
from isthmus.live.cluster.launcher import Launcher, LaunchSpec, Process
from isthmus.live.cluster.node import NodeProcess
from isthmus.live.cluster.process import EngineProcess
from isthmus.live.gateway.server import bind, serve_http
from isthmus.live.messenger import network
from isthmus.live.messenger.tcp import TcpPort
from tests.pace import paced
from tests.served import LIMIT_S, POLL_S, Client

Tiers = dict[BlockName, Tier]

IDLE_S = LIMIT_S
_DEFAULTS = {
    "engine.threads": 1, "engine.kv_memory": "64MiB",
    "limits.silence_s": 600, "limits.transfer_s": 600, "limits.link_s": 600,
}  # fmt: skip
"""Nodes share this process: none of them can die alone, and a busy machine makes all of them late."""


class TaskLauncher(Launcher):
    """Starts each process of each node as a task. One that ended stays away."""

    def __init__(self) -> None:
        self.processes: list[EngineProcess] = []
        self._tasks: dict[str, asyncio.Task[str]] = {}

    async def start(self, process: Process, spec: LaunchSpec) -> None:
        self.processes.append(process_of(spec))
        self._tasks[process.name] = asyncio.create_task(self.processes[-1].run())

    async def wait(self, process: Process) -> str:
        await self._tasks[process.name]
        return await asyncio.Future()

    async def close(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Held:
    """Steps of engines that wait until they are let. `begin`: is called before any is."""

    def __init__(self, names: Iterable[str], begin: Callable[[], None]) -> None:
        self._left, self._is_over, self._changed = dict.fromkeys(names, 0), False, threading.Condition()
        self._begin = begin

    def take(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_over or self._left[name], LIMIT_S)
            self._left[name] -= 1

    def let(self, count: int) -> None:
        """So many of each engine."""
        self._begin()
        with self._changed:
            self._left = dict.fromkeys(self._left, count)
            self._changed.notify_all()

    def is_spent(self) -> bool:
        """Whether an engine has taken all its steps."""
        return min(self._left.values()) == 0

    def end(self) -> None:
        self._begin()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Inside(Client):
    """A running cluster, with its insides open. `call` runs a function in its event loop."""

    def __init__(
        self,
        url: str,
        head: Head,
        processes: list[EngineProcess],
        loop: asyncio.AbstractEventLoop,
        end: asyncio.Event,
        key: str | None,
    ) -> None:
        super().__init__(url, key)
        self.head, self.processes, self.end, self._loop = head, processes, end, loop

    def call(self, function: Callable[[], Any]) -> Any:
        async def work() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(LIMIT_S)

    @contextlib.contextmanager
    def stepping(self, before: Callable[[NodeProcess], object]) -> Iterator[None]:
        """Meanwhile each node calls `before` in its own thread, without its lock, when its engine is to compute."""

        def step_of(process: NodeProcess) -> Callable[..., Any]:
            step = process.runs.engine.step

            def stepped(*arguments: Any) -> Any:
                before(process)
                return step(*arguments)

            return stepped

        with contextlib.ExitStack() as stack:
            for process in self.processes:
                if isinstance(process, NodeProcess):
                    patched = mock.patch.object(process.runs.engine, "step", step_of(process))
                    stack.enter_context(patched)
            yield

    @contextlib.contextmanager
    def together(self, count: int) -> Iterator[None]:
        """Meanwhile nothing is computed until so many requests have been there at once: however slowly they come, what
        is decided about each is decided before any of them has begun."""
        came, go_on = threading.Event(), self._stop_clock()

        def wait(_: NodeProcess) -> None:
            until = time.monotonic() + LIMIT_S
            while not came.is_set():
                if len(self.head._streams) >= count:
                    go_on()
                    came.set()
                assert time.monotonic() < until, f"not {count} requests, but {len(self.head._streams)}"
                time.sleep(POLL_S)

        with self.stepping(wait):
            yield

    def _stop_clock(self) -> Callable[[], None]:
        """The conductor's: it would take what nobody computes for computed when its time is over. Until this is called,
        in any thread."""
        now, stopped = self.head._clock_ns(), contextlib.ExitStack()
        stopped.enter_context(mock.patch.object(self.head, "_clock_ns", partial(int, now)))
        return stopped.close

    def kill(self, name: str) -> None:
        """Ends a node at once: nothing of it is heard any more. It does not come back."""
        process = next(each for each in self.processes if each._facts.node == name)
        self.processes.remove(process)

        def end() -> None:
            assert process._head is not None
            for session in [*process.peers._names, process._head]:
                session.abort("killed")

        self.call(end)

    @contextlib.contextmanager
    def held(self) -> Iterator[Held]:
        """Engines take no step meanwhile but those that are let: what is asked comes together, and is not over before
        the test has done what it must do in its midst."""
        nodes = [each._facts.node for each in self.processes if isinstance(each, NodeProcess)]
        held = Held(nodes, self._stop_clock())
        with self.stepping(lambda process: held.take(process._facts.node)):
            try:
                yield held
            finally:
                held.end()

    def check_idle(self) -> None:
        """All that requests took comes back, on every node; and the conductor knows what each node has, by tier."""
        until = time.monotonic() + IDLE_S
        while left := self.call(self._left):
            assert time.monotonic() < until, f"not idle: {left}"
            time.sleep(POLL_S)

    def _left(self) -> list[str]:
        """What is not idle, or not as the conductor believes."""
        found = [f"{len(self.head._streams)} requests"] if self.head._streams else []
        for process in self.processes:
            name = f"{process._facts.node}.{process._options.stage}"
            found += [f"{name}: {what}" for what in left_of(process)]
            if isinstance(process, NodeProcess) and not found:
                found += [f"{name}: {what}" for what in self._strange(process)]
        return found

    def _strange(self, process: NodeProcess) -> list[str]:
        """How the conductor's index, the node's books and its store differ."""
        view = self.head._desk.conductor.view
        bit = view.nodes[process.node.node].bit
        believed = {
            name: Tier.DISK if view.index._disk.get(name, 0) & bit else Tier.MEMORY
            for name, holders in view.index._held.items()
            if holders & bit
        }
        decided, stored = decided_of(process), stored_of(process)
        for name, tier in decided.items():
            if tier is Tier.MEMORY and stored.get(name) is Tier.DISK:
                stored[name] = tier  # it is promoted as far as there is room
        return differences(decided, believed, "the conductor believes") + differences(
            decided, stored, "its store has"
        )


def left_of(process: EngineProcess) -> list[str]:
    """What has not come back on a node, or a stage."""
    found = []
    if isinstance(process, NodeProcess):
        with process.worker.lock:
            try:
                process.node.check()
                process.node.check_idle()
            except AssertionError as error:
                found.append(str(error) or repr(error))
    mover = process.mover
    if mover._loads or mover._read or mover._staged or mover._fetches:
        found.append("loads, reads, stagings or fetches")
    if mover._loans is not None and mover._loans._loans:
        found.append("loans")
    if process._cache is not None:
        stat = process._cache.store.stat()
        if stat.num_pinned or stat.num_reserved:
            found.append(f"{stat.num_pinned} slots pinned, {stat.num_reserved} reserved")
    return found


def decided_of(process: NodeProcess) -> Tiers:
    """Every block that a node can give to a prompt, by its own books."""
    node = process.node
    if node.tiers is None:
        return dict.fromkeys(node.scheduler.pool._block_of, Tier.MEMORY)
    return dict.fromkeys(node.tiers.dram.held, Tier.MEMORY) | dict.fromkeys(node.tiers.ssd.held, Tier.DISK)


def stored_of(process: NodeProcess) -> Tiers:
    """The blocks whose bytes a node has."""
    if process._cache is None:
        return decided_of(process)
    store = process._cache.store
    with store._changed:
        names = list(store._directory.blocks)
    found = {name: store.tier(name) for name in names}
    return {name: tier for name, tier in found.items() if tier is not None}


def differences(decided: Tiers, other: Tiers, who: str) -> list[str]:
    pairs = [(decided.get(name), other.get(name)) for name in decided.keys() | other.keys()]
    wrong = Counter((ours, theirs) for ours, theirs in pairs if ours is not theirs)
    return [f"{count} blocks are in {ours}, and {who} {theirs}" for (ours, theirs), count in wrong.items()]


@contextlib.contextmanager
def inside(settings: dict[str, Any], *, key: str | None = None) -> Iterator[Inside]:
    """`settings`: as in a configuration file; `key`: to ask with. At the end, everything must be idle."""
    config = load_config(None, _DEFAULTS | flat(settings))
    opened: Future[Inside] = Future()
    with ThreadPoolExecutor(1) as thread:
        over = thread.submit(_run, config, key, opened)
        over.add_done_callback(lambda done: opened.cancel())
        try:
            cluster = opened.result(LIMIT_S)
        except CancelledError:
            over.result()
            raise
        try:
            with contextlib.closing(cluster.http):
                yield cluster
                cluster.check_idle()
        finally:
            cluster.call(cluster.end.set)
            over.result(LIMIT_S)


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections of options that have defaults here, by dotted names."""
    sections = {"engine": paced(settings.get("engine", {})), "limits": settings.get("limits", {})}
    return {
        f"{section}.{option}": value for section, given in sections.items() for option, value in given.items()
    } | {name: value for name, value in settings.items() if name not in ("engine", "limits")}


def _run(config: Config, key: str | None, opened: Future[Inside]) -> None:
    interval, ports = sys.getswitchinterval(), list[TcpPort]()

    def port_of(on_ended: Callable[[], object]) -> TcpPort:
        ports.append(TcpPort(on_ended))
        return ports[-1]

    sys.setswitchinterval(SWITCH_S)
    try:
        with (
            mock.patch.object(network, "TcpPort", port_of),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_serve(config, key, opened))
            runner.run(_hang_up(ports))
    finally:
        sys.setswitchinterval(interval)


async def _hang_up(ports: list[TcpPort]) -> None:
    """What the end of a process does to its sockets."""
    for port in ports:
        if port.session is not None:
            port.session.abort("its process ended")
    await asyncio.sleep(0)


async def _serve(config: Config, key: str | None, opened: Future[Inside]) -> None:
    launcher = TaskLauncher()
    cluster, app = assemble(config, launcher)
    bound, end = bind(config.host, 0), asyncio.Event()
    url = f"http://{config.host}:{bound.getsockname()[1]}"
    async with cluster.run():
        http = asyncio.create_task(serve_http(app, bound, end, drain_s=1))
        await cluster.wait_ready()
        loop = asyncio.get_running_loop()
        cluster_inside = await asyncio.to_thread(Inside, url, cluster.head, launcher.processes, loop, end, key)
        opened.set_result(cluster_inside)
        await http
