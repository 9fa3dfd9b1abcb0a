"""What a worker asks of an engine, and what both sides pass. Loads no torch.

An engine computes batches of chunks into paged KV memory, addressed by slot = block * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ConfigError
from isthmus.core.reuse import Packing, Passage, Selection
from isthmus.core.types import Reused, Sampling, TokenLogprobs

if TYPE_CHECKING:
    from isthmus.live.engine.constraints import Constraints

OnLayer = Callable[[int], None]
"""Called with the number of a layer as soon as the batch's KV of that layer is in place."""

SIGNATURE_BITS = 512

BeforeLayer = Callable[[int], None]
"""Called with the number of a layer before anything of its KV is read or written. It may block, which holds up
the step, and may raise: the step ends with that exception and may be repeated, with the same result. A model with
recurrent layers calls it for all layers before it computes anything."""


OnScores = Callable[[int, int, Sequence[TokenLogprobs]], None]
"""Called with the index of a chunk, in the caller's order, the position of one of its `targets`, and the scores of that
and of the targets behind it. All targets of a chunk are told once a step, in their order, some at a time."""


@dataclass(frozen=True)
class Held:
    """So many of a request's tokens lie with `holders`, in all layers that keep KV; an equal part of the heads with
    each, in their order."""

    holders: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True)
class Asking:
    """Of one holder, that has part number `part` of `parts` of the heads: what each of the flat tokens whose KV it has
    some of asks, in their order. `chunks`: (index of the chunk in the caller's order, its flat tokens, tokens there
    that they attend to, position of its first flat token, position of the first of those there)."""

    holder: str
    chunks: tuple[tuple[int, int, int, int, int], ...]
    part: int = 0
    parts: int = 1

    @property
    def num_rows(self) -> int:
        return sum([rows for _, rows, *_ in self.chunks])


class Elsewhere(Protocol):
    """Attention over KV that other engines hold. For one step; each flat token goes layer by layer. Where parts of a
    batch take turns, each asks for tokens of its own, perhaps from several threads."""

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        """Sends the queries `[R, H, D]` of these rows, float32, H heads of this part; does not wait."""

    def answer(self, layer: int, asking: Asking) -> memoryview:
        """`out [R, H, D]` and then `lse [R, H]`, both float32, natural logarithm. Raises HolderLost."""


class HolderLost(Exception):
    """A holder did not answer: the step ends, and may not be repeated with it."""

    def __init__(self, holder: str, reason: str) -> None:
        super().__init__(reason)
        self.holder = holder


@dataclass(frozen=True)
class HolderQueries:
    """At the holder: the next `num_rows` queries attend to the first `num_tokens` tokens in `blocks`, which are those
    from `position` on of a request. `first`: position of the first query, each further one follows it (for windows)."""

    blocks: Sequence[int]
    num_rows: int
    num_tokens: int
    first: int
    position: int


@dataclass(frozen=True)
class Donated:
    """KV of another prompt, for one that is assembled: `tokens` from `position` on, in these blocks of the engine."""

    tokens: Sequence[int]
    blocks: Sequence[int]
    position: int = 0


@dataclass(frozen=True)
class Assembling:
    """How a chunk, which is then all that is left of its prompt, is computed with donors' KV: as `selection` says
    (`isthmus.core.reuse`). `passages`: what is the same text, or some of it. `packed`: blocks to pack into what
    `packing` keeps of the prompt; no donor needs them when the step is over."""

    selection: Selection
    donors: tuple[Donated, ...]
    passages: tuple[Passage, ...] = ()
    packing: Packing | None = None
    packed: Sequence[int] = ()


@dataclass(frozen=True)
class Chunk:
    """Compute `tokens`, which stand at positions `[start, start + len(tokens))` of one request.

    `blocks` cover at least those positions; KV of the positions before `start` is in place already. Where `holdings`
    are given, the first tokens lie elsewhere, so many with each in the order of their positions, and `blocks` begin
    with the token behind them. They end at or before `start`, and are whole blocks.
    `samples`: the token after the last one is wanted. `decodes`: this is one token of an answer, not part of a
    prompt. `salt`: of the request's caches. `targets`: to be scored, the tokens that follow the first, second and so on
    of `tokens`; with the `num_top` most likely in place of each.

    Of a model with recurrent layers only (others ignore them): `slot`, where the engine keeps the request's live
    state, below its number of slots. The chunk continues from that state, unless `start` is 0, which zeroes it, or
    `restore` names the `layout.state_blocks` blocks whose snapshot, taken at position `start`, becomes the live
    state first. `snapshots`: (position, blocks), ascending and in `(start, stop]`: the live state after the token
    at `position - 1` is written to those blocks, and is there when the step returns.

    `assembling`: see there. `packing`: of a prompt that was packed, what is kept of its first blocks: `blocks` begin
    with the packed ones.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    decodes: bool = False
    salt: str = ""
    slot: int = 0
    restore: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, tuple[int, ...]], ...] = ()
    targets: Sequence[int] = ()
    num_top: int = 0
    holdings: tuple[Held, ...] = ()
    assembling: Assembling | None = None
    packing: Packing | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def num_absent(self, block_size: int) -> int:
        """Leading tokens that are not in `blocks`: their KV lies elsewhere, or was dropped."""
        dropped = self.packing.num_dropped * block_size if self.packing is not None else 0
        return sum([held.num_tokens for held in self.holdings]) + dropped


@dataclass(frozen=True, eq=False)
class Row:
    """What the choice of one next token depends on beside its KV. `outputs`: the tokens generated so far; `prompt`:
    the distinct tokens before them, if those are to be repeated less.

    It is one row from its first token to its last: `outputs` grows, and nothing in it changes."""

    sampling: Sampling
    outputs: Sequence[int]
    prompt: Sequence[int] = ()


Sampled = tuple[list[int], list[TokenLogprobs | None]]
"""Tokens and their log-probabilities (None unless asked for), one of each for every chunk that samples."""


@dataclass(frozen=True)
class Hidden:
    """What one pipeline stage hands the next for one batch, bit for bit: `data` is a dense array of this shape.

    Only a stage of the same model and kind of engine can take it. `shape` and `dtype` are all that a peer must be
    told beside the bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    data: memoryview


class Batch(Protocol):
    """Chunks laid out to be computed together."""

    order: list[int]
    """Index of the chunk, in the caller's order, that each sampled token belongs to."""
    reused: dict[int, Reused]
    """After a step, of each chunk that was assembled: where its KV came from; `exact` tokens are those before it."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Moves a batch of decodes on by one position each, with the tokens just sampled."""


class KVBytes(Protocol):
    """KV memory as bytes, for those that move it."""

    layout: KVLayout
    num_blocks: int

    def export(self, layer: int, first: int, stop: int) -> memoryview:
        """The bytes of slots `[first, stop)` of a layer, to be read."""

    def export_heads(self, layer: int, first: int, stop: int, part: int, parts: int) -> memoryview:
        """A copy of part number `part` of `parts` of the KV heads of these slots, laid out as in `split(parts)`."""

    def split(self, parts: int) -> KVBytes:
        """The same memory as blocks with a `parts`-th of the KV heads each, `parts` times as many: block b of these is
        blocks `[parts b, parts (b + 1))` of those."""

    def landing(self, layer: int, first: int, stop: int) -> memoryview:
        """A buffer to receive slots `[first, stop)` of a layer into; `land` makes its bytes the KV."""

    def land(self, layer: int, first: int, stop: int, data: memoryview) -> None:
        """Completes a `landing`."""

    def fill(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        """`arena[offsets[i] : offsets[i] + slice_bytes]` becomes block `blocks[i]` of a layer, which nothing else
        may touch meanwhile. From any thread; the bytes are in place when it returns."""

    def save(self, layer: int, blocks: Sequence[int], arena: memoryview, offsets: Sequence[int]) -> None:
        """The reverse of `fill`, for blocks whose KV of this layer is in place (`OnLayer`). From any thread."""


class Engine(Protocol):
    """One model, or one pipeline stage of it, with its KV memory. Not thread-safe: one thread steps it.

    `revision` and `layout` name the blocks: they are the whole model's, in each of its stages. `layers`: the
    half-open range of layers it computes; `memory.layout` has only these. Wherever a layer is named, in `memory`,
    `OnLayer` and `BeforeLayer`, only those that keep KV count, from the stage's own first on. `max_length`: longest
    prompt and answer together, in tokens. `constraints`: what `step` chooses from; it knows of rows that nothing can
    be chosen for any more.
    """

    layout: KVLayout
    layers: tuple[int, int]
    max_length: int
    constraints: Constraints

    @property
    def revision(self) -> str: ...

    @property
    def memory(self) -> KVBytes: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def products(self) -> tuple[str, ...]:
        """Which product was the fastest for each shape of its weights, where that was timed, a line each:
        "576x1536 bfloat16: native to 2, torch bfloat16 beyond"."""

    def directions(self) -> bytes:
        """`[vocab_size, SIGNATURE_BITS]` int8: what each token adds to a prompt's embedding in so many random
        directions. The signs of the sum over a prompt's distinct tokens are its signature. From any thread, while a
        step runs; only engines that assemble prompts are asked."""

    def build(self, chunks: Sequence[Chunk]) -> Any:
        """A `Batch` of this engine's own kind. The stages of a pipeline build theirs from the same chunks in the
        same order, each with its own blocks."""

    def step(
        self,
        batch: Any,
        rows: Sequence[Row],
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
        on_scores: OnScores | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Sampled:
        """One iteration: writes the new KV and chooses a token for each chunk that samples, in `batch.order`.

        `rows` stand in that order too; the token of one that there is an objection to (`constraints`) means nothing.
        A step that `before_layer` broke off has announced the layers before to
        `on_layer`; repeated, it announces them again, with the same bytes in place. The last stage of a pipeline
        takes the `hidden` that the stage before gave, and leaves it unchanged; a whole model takes none. `on_scores`
        is told after the last layer; `elsewhere` is asked where chunks have holdings. Raises ProtocolError when
        `hidden` does not fit the batch, HolderLost.
        """

    def attend(self, layer: int, asked: Sequence[HolderQueries], q: memoryview, parts: int = 1) -> memoryview:
        """What queries `[R, H, D]` of other engines get of KV that lies here: `out [R, H, D]` and then `lse [R, H]`,
        all float32, H a `parts`-th of the model's heads; blocks are those of `memory.split(parts)`. From any thread,
        while a step runs; nobody writes to those blocks meanwhile. Raises ProtocolError for queries of other rows."""

    def relay(
        self,
        batch: Any,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
    ) -> Hidden:
        """The iteration of a stage that is not the last: writes its layers' KV, and gives what the next stage
        takes. `hidden` and the rest as for `step`; the first stage takes none."""


def split_layers(num_layers: int, stages: int) -> list[tuple[int, int]]:
    """Half-open layer ranges of the stages of a pipeline, as even as can be, the longer ones first: the last stage
    also has the head to compute. Raises ConfigError when a stage would be empty."""
    if not 1 <= stages <= num_layers:
        raise ConfigError(
            f"a model of {num_layers} layers makes 1 to {num_layers} pipeline stages, not {stages}"
        )
    size, longer = divmod(num_layers, stages)
    starts = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return list(pairwise(starts))


def stage_layout(layout: KVLayout, layers: tuple[int, int]) -> KVLayout:
    """The layout of a stage's own KV bytes, from the whole model's. Never for naming blocks."""
    first, stop = layers
    assert 0 <= first < stop <= layout.num_layers, "a stage has some of the model's layers"
    return msgspec.structs.replace(layout, num_layers=stop - first)


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
