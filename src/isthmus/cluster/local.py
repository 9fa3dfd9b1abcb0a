"""A whole cluster on this machine: the head here, every node a child process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from isthmus.cluster.head import Head
from isthmus.cluster.launcher import Launcher
from isthmus.cluster.links import network_of
from isthmus.cluster.recorder import Recorder
from isthmus.config import Config
from isthmus.deploy import rules_of
from isthmus.errors import StartError
from isthmus.types import ModelCard


class LocalCluster:
    """`run` it as a context; `wait_ready` inside. `head` is the gateway's handle, unhealthy until then."""

    def __init__(self, config: Config, model: Path, card: ModelCard) -> None:
        limits, rules = config.limits, rules_of(config)
        self._recorder = Recorder(Path(config.record), rules) if config.record else None
        self._token = config.token or secrets.token_hex(16)
        self._config, self._model = config, model
        self.head = Head(
            rules,
            card,
            token=self._token,
            silence_s=limits.silence_s,
            rejoin_s=limits.rejoin_s,
            recorder=self._recorder,
            network=network_of(config),
        )

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Starts all nodes; on the way out stops them, and none is left. Raises StartError."""
        config = self._config
        try:
            join = await self.head.open(config.join_host, config.join_port)
        except OSError as error:
            where = f"{config.join_host}:{config.join_port}"
            raise StartError(f"cannot listen for nodes on {where}: {error.strerror}") from None
        self._launcher = Launcher(config, self._model, join=join, token=self._token)
        self._failure: asyncio.Task[None] | None = None
        try:
            await self._launcher.start()
            self._failure = asyncio.create_task(self._launcher.failure())
            yield
        finally:
            await self.head.close()
            await self._launcher.stop()
            if self._failure is not None:
                self._failure.cancel()
                await asyncio.gather(self._failure, return_exceptions=True)
            if self._recorder is not None:
                self._recorder.close()

    async def wait_ready(self) -> None:
        """Returns when every node has joined. Raises StartError when one cannot, or it takes too long."""
        assert self._failure is not None
        joined = asyncio.create_task(self.head.wait_for(self._launcher.nodes))
        limit = self._config.limits.start_s
        done, _ = await asyncio.wait(
            {joined, self._failure}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
        )
        if self._failure in done:
            joined.cancel()
            self._failure.result()
        if joined not in done:
            joined.cancel()
            raise StartError(f"the nodes were not ready within {limit:g} s (limits.start_s)")
        self._launcher.ready = True
