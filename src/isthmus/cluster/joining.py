"""A deployment whose nodes somebody else starts, on whatever machines: by hand, with `srun`, or Kubernetes. Only the
head is here. It knows how many nodes of each role are to come, and neither where they are nor what they are called."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator

from isthmus.cluster.local import LocalCluster, signs
from isthmus.config import Config
from isthmus.deploy import places_of
from isthmus.errors import ConfigError
from isthmus.types import Role

log = logging.getLogger(__name__)

STOP_S = 5.0
"""How long nodes may take to leave."""


def check_joining(config: Config) -> None:
    """Raises ConfigError for what only `isthmus serve` can start, and where nobody could show the token."""
    if config.token is None and not signs(config, config.join_host):
        raise ConfigError(
            "placement: join: nodes need the cluster's token: set ISTHMUS_TOKEN, or token in the file"
        )
    if any(place.stages > 1 for place in places_of(config)):
        raise ConfigError("roles.prefill.pipeline: groups are started with placement: local only")
    for link in config.links:
        if link.emulate != "none":
            between = " and ".join(link.between)
            raise ConfigError(
                f"links: between {between}: placement: join has no emulated links; write emulate: none"
            )


class JoinedCluster(LocalCluster):
    """As its base, but that it waits for nodes, for as long as they take, and starts none."""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """On the way out nodes are told to stop. Raises StartError."""
        join = await self._open_head()
        log.warning("waiting for %s to join at %s", _in_words(self._missing()), join)
        try:
            yield
        finally:
            await self.head.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self.head.wait_until(lambda: not self.head.nodes())
            if self._recorder is not None:
                self._recorder.close()

    async def wait_ready(self) -> None:
        """Returns when as many nodes of each role as configured have joined."""
        await self.head.wait_until(lambda: not self._missing())
        self.head.complete()

    def _missing(self) -> Counter[tuple[str, Role]]:
        """How many nodes are still to come, by cluster and role."""
        wanted = Counter((place.cluster.name, place.role) for place in places_of(self._config))
        return wanted - Counter((cluster, role) for role, _, cluster in self.head.nodes().values())


def _in_words(nodes: Counter[tuple[str, Role]]) -> str:
    found = [f"{count} {role}{f' of {cluster}' if cluster else ''}" for (cluster, role), count in nodes.items()]
    return f"{', '.join(found)} node{'s' if sum(nodes.values()) > 1 else ''}"
