"""What is known of one plain server's prefix cache: by its KV events while all of them were heard, else by a belief."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import zmq

from isthmus.core.node.events import EngineBlocks
from isthmus.core.node.heard_blocks import HeardBlocks
from isthmus.core.node.plain_server import DOUBT, PlainServer, Reports
from isthmus.core.scheduler import chains_of
from isthmus.core.types import NOBODY, NodeId, Tenant
from isthmus.live.servers.hearing import Hearing
from isthmus.live.servers.naming import Named, Naming
from isthmus.live.servers.state_file import Kept, joined
from isthmus.live.servers.told import Description

log = logging.getLogger(__name__)


class Cached:
    """The cache of a server that describes itself as `told`, in names of its pool. `report` takes each change, for the
    conductor.

    Events tell of blocks of tokens. What they do not tell, such as of prompts that are known by their text, is believed
    (`core.node.plain_server`).
    """

    def __init__(
        self, node: NodeId, told: Description, naming: Naming, report: Callable[[Reports], None]
    ) -> None:
        self._node, self._told, self._naming, self._report = node, told, naming, report
        self._belief, self._spare = self._new_belief(), self._new_belief()
        """`_spare`: what would be believed of prompts of tokens, while events say it: for when they do not any more."""
        self._known: HeardBlocks | None = None
        self._hearing: Hearing | None = None

    def _new_belief(self) -> PlainServer:
        return PlainServer(self._node, self._told.kv_tokens // self._naming.block_tokens)

    @property
    def is_known(self) -> bool:
        """Whether events say what is cached."""
        return self._known is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that the cache has, or is believed to have."""
        return self._belief.num_blocks + (self._known.num_blocks if self._known is not None else 0)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the cache is believed to hold at most."""
        return self._belief.capacity_blocks

    @property
    def capacity_tokens(self) -> int:
        return self._belief.capacity_blocks * self._naming.block_tokens

    @property
    def capacity_from(self) -> Literal["told", "guessed", "learnt"]:
        """From where that is known: the server, nobody, or its answers."""
        return self._belief.capacity_from

    def match(self, named: Named) -> int:
        """Returns the number of leading blocks of a prompt that are cached."""
        if self._known is not None and named.is_exact:
            return self._known.match(named.names)
        return self._belief.match(named.names)

    def computed(self, named: Named, tenant: Tenant = NOBODY) -> None:
        """Takes a prompt that the server has computed."""
        if self._known is not None and named.is_exact:
            self._spare.computed(named.names)
        else:
            self._report(self._belief.computed(named.names, tenant))

    def corrected(self, named: Named, believed: float, cached: float, num_prompt: int) -> None:
        """Takes what an answer says, as `PlainServer.told`. `num_prompt`: tokens of the prompt, as the server counts
        them."""
        if self._known is None or not named.is_exact:
            # Of a prompt the last block that is not full, and the last token of one that is, are computed each time.
            self._belief.told(believed, cached, DOUBT + self._told.block_tokens / num_prompt)

    # Events.

    def listen(self, kept: Kept | None) -> None:
        """Follows the server's events, if it has some that mean something here. `kept`: of an earlier run."""
        told, naming = self._told, self._naming
        is_same = kept is not None and kept.is_of(told, naming) and told.started_s > 0
        saved = kept.heard if kept is not None and is_same else None
        if told.events is None or not naming.knows_tokens:
            return
        if told.block_tokens != naming.block_tokens:
            log.warning(
                "%s: its blocks have %d tokens and those of other servers of its model %d; its KV events are not used",
                self._node, told.block_tokens, naming.block_tokens,
            )  # fmt: skip
            return
        most_blocks = told.kv_tokens // told.block_tokens
        try:
            self._hearing = Hearing(
                told.events, naming, most_blocks, self._heard, self._know, self._believe, saved
            )
        except zmq.ZMQError as error:
            log.warning(
                "%s: its KV events at %s cannot be followed: %s", self._node, told.events.endpoint, error
            )

    def close(self) -> None:
        """Hears no events any more."""
        if self._hearing is not None:
            self._hearing.close()

    def _heard(self, fact: EngineBlocks) -> None:
        if self._known is not None:
            self._report(self._known.on(fact))

    def _know(self) -> None:
        """Events say from now on what is cached."""
        if self._known is None:
            log.info("%s: its KV events say what it has cached", self._node)
            self._spare = self._new_belief()
            self._spare.restore(self._belief.capacity_blocks, chains_of(self._belief.entries()))
            self._report(self._belief.forget())
            self._known = HeardBlocks(self._node)

    def _believe(self) -> None:
        """Events do not say any more what is cached."""
        if self._known is not None:
            log.warning("%s: KV events are lost; what it has cached is believed again", self._node)
            self._report(self._known.forget())
            self._known = None
            self._report(self._belief.restore(self._belief.capacity_blocks, chains_of(self._spare.entries())))

    # Other runs of the router, and of the server.

    def snapshot(self) -> Callable[[], Kept]:
        """Returns a function that makes, in any thread, what a state file keeps: it takes a while."""
        told, naming, capacity_blocks = self._told, self._naming, self._belief.capacity_blocks
        entries = (self._belief if self._known is None else self._spare).entries()
        heard = self._hearing.snapshot() if self._hearing is not None else lambda: None
        return lambda: Kept(
            str(self._node), told.started_s, told.names, naming.knows_tokens, naming.block_tokens,
            capacity_blocks, joined(chains_of(entries)), heard(),
        )  # fmt: skip

    def restore(self, kept: Kept) -> None:
        """Takes up what was believed before, if the server still has those blocks, under those names."""
        if kept.is_of(self._told, self._naming):
            self._report(self._belief.restore(kept.capacity_blocks, kept.names()))
