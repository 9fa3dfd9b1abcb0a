"""The head's data on donor prompts, from which others may be assembled: their tokens, and the table for signatures.

A node sends the table, which is its engine's, in parts, when the first prompt needs a signature.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import blake3
import numpy as np

from isthmus.core.attempts import Route
from isthmus.core.conductor import PromptContent
from isthmus.core.errors import ProtocolError
from isthmus.core.reuse import cut
from isthmus.core.types import Job, ModelCard, NodeId, RequestId, Reuse
from isthmus.live.engine.interface import SIGNATURE_BITS
from isthmus.live.peers.messages import Directions

PART_ROWS = 8192


class DonorTokens:
    """Tokens of donors, signatures of prompts. `asked`: the node that sends the table; `ready`: the table is complete,
    or the model needs none."""

    def __init__(self, card: ModelCard) -> None:
        self.asked: NodeId | None = None
        self.block_size = 1
        self._no_reuse, self._num_rows, self._known = card.no_reuse, card.vocab_size, 0
        self._table = np.empty((0, SIGNATURE_BITS), np.int8)
        self._kept: dict[RequestId, tuple[str, array[int]]] = {}

    @property
    def ready(self) -> bool:
        return bool(self._no_reuse) or self._known == self._num_rows

    def left(self, node: NodeId) -> None:
        """Forgets a node that left, so that another one is asked for the table."""
        if node == self.asked:
            self.asked = None

    def take(self, part: Directions) -> None:
        """Takes the next rows of the table, or the first ones of a table that is sent anew. Raises ProtocolError."""
        rows, rest = divmod(len(part.rows), SIGNATURE_BITS)
        if part.first == 0:
            self._known, self._table = 0, np.empty((self._num_rows, SIGNATURE_BITS), np.int8)
        if rest or not rows or part.first != self._known or part.first + rows > self._num_rows:
            raise ProtocolError(f"rows of signatures from {part.first} on follow {self._known}")
        table = np.frombuffer(part.rows, np.int8).reshape(rows, SIGNATURE_BITS)
        self._table[part.first : part.first + rows] = table
        self._known += rows

    def sign(self, tokens: Sequence[int]) -> bytes:
        """Returns the signature of a prompt: sign bits of the sum of its distinct tokens' rows. Empty until `ready`."""
        if self._known < self._num_rows:
            return b""
        sums = self._table[np.unique(np.asarray(tokens))].sum(0, dtype=np.int32)
        return np.packbits(sums > 0, bitorder="little").tobytes()

    def content_of(self, job: Job) -> PromptContent | None:
        """Returns what the conductor needs to find donors for a prompt; None for one that is computed exactly."""
        if job.reuse is Reuse.EXACT or self._no_reuse:
            return None
        pieces, stops = cut(job.tokens, job.salt)
        return PromptContent(job.reuse, scope_of(job.tenant, job.salt), pieces, stops, self.sign(job.tokens))

    def keep(self, job: Job) -> None:
        """Keeps the tokens of a prompt's full blocks."""
        full = len(job.tokens) // self.block_size * self.block_size
        self._kept[job.request] = job.salt, array("I", job.tokens[:full])

    def drop(self, request: RequestId) -> None:
        del self._kept[request]

    def of(self, route: Route, job: Job) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens of the blocks that a route takes from each donor."""
        if route.assembly is None:
            return ()
        found = list[tuple[int, ...]]()
        for donor in route.assembly.donors:
            salt, tokens = self._kept[donor.request]
            assert salt == job.salt, "a prompt of another tenant"
            found.append(tuple(tokens[donor.first * self.block_size : len(donor.names) * self.block_size]))
        return tuple(found)


def scope_of(tenant: str, salt: str) -> bytes:
    """Returns a digest of tenant and salt: prompts of one scope may be donors for each other."""
    key = blake3.blake3(salt.encode(), derive_key_context="isthmus 2026 scope of prompts").digest()
    return blake3.blake3(tenant.encode(), key=key).digest(length=16)


def parts_of(table: bytes) -> Iterator[Directions]:
    """Cuts a table, `[vocab_size, SIGNATURE_BITS]` int8, into messages."""
    step = PART_ROWS * SIGNATURE_BITS
    for start in range(0, len(table), step):
        yield Directions(start // SIGNATURE_BITS, table[start : start + step])
