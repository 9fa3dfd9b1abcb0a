"""What a worker asks of an engine, and what both sides pass. Loads no torch.

An engine computes batches of chunks into paged KV memory, addressed by slot = block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isthmus.blocks import KVLayout
from isthmus.types import Sampling, TokenLogprobs

OnLayer = Callable[[int], None]
"""Called with the number of a layer as soon as the batch's KV of that layer is in place."""


@dataclass(frozen=True)
class Chunk:
    """Compute `tokens`, which stand at positions `[start, start + len(tokens))` of one request.

    `blocks` cover at least those positions; KV of the positions before `start` is in place already.
    `samples`: the token after the last one is wanted. `decodes`: this is one token of an answer, not part of a
    prompt. `salt`: of the request's caches.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    decodes: bool = False
    salt: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Row:
    """What the choice of one next token depends on beside its KV. `outputs`: the tokens generated so far."""

    sampling: Sampling
    outputs: Sequence[int]


Sampled = tuple[list[int], list[TokenLogprobs | None]]
"""Tokens and their log-probabilities (None unless asked for), one of each for every chunk that samples."""


class Batch(Protocol):
    """Chunks laid out to be computed together."""

    order: list[int]
    """Index of the chunk, in the caller's order, that each sampled token belongs to."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves a batch of decodes on by one position each, with the tokens just sampled."""


class KVBytes(Protocol):
    """KV memory as bytes, for those that move it."""

    layout: KVLayout
    num_blocks: int

    def export(self, layer: int, first: int, stop: int) -> memoryview:
        """The bytes of slots `[first, stop)` of a layer, to be read."""

    def landing(self, layer: int, first: int, stop: int) -> memoryview:
        """A buffer to receive slots `[first, stop)` of a layer into; `land` makes its bytes the KV."""

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Completes a `landing`."""


class Engine(Protocol):
    """One model with its KV memory. Not thread-safe: one thread steps it.

    `revision`: names model and weights; `max_length`: longest prompt and answer together, in tokens.
    """

    layout: KVLayout
    max_length: int

    @property
    def revision(self) -> str: ...

    @property
    def memory(self) -> KVBytes: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def build(self, chunks: Sequence[Chunk]) -> Any:
        """A `Batch` of this engine's own kind."""

    def step(self, batch: Any, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sampled:
        """One iteration: writes the new KV and chooses a token for each chunk that samples, in `batch.order`.

        `rows` stand in that order too.
        """


def runs_of(blocks: Sequence[int], block_size: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The slots of token positions `[start, stop)` as half-open slot ranges, as few as the blocks allow."""
    position = start
    while position < stop:
        index = position // block_size
        first = blocks[index] * block_size + position % block_size
        last = index
        while (last + 1) * block_size < stop and blocks[last + 1] == blocks[last] + 1:
            last += 1
        end = min(stop, (last + 1) * block_size)
        yield first, first + end - position
        position = end
