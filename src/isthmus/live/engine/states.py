"""Live states of recurrent layers, and a batch's reads and writes of them.

A snapshot is one sequence's live state as bytes: of each recurrent layer in order the window of the convolution and
then the matrices (`linear.State`), float32. It lies in `layout.state_blocks` blocks of the KV memory: their bytes in
order of block, then KV layer; the end of the last block is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus.core.blocks import KVLayout
from isthmus.core.models import DeltaRule
from isthmus.live.engine.interface import Chunk
from isthmus.live.engine.kv import KVMemory
from isthmus.live.engine.linear import State


@dataclass(frozen=True)
class Snapshot:
    """A state on its way to its blocks. `numbers_LX`: a view of `data`, which is the blocks' bytes."""

    blocks: tuple[int, ...]
    data: Tensor
    numbers_LX: Tensor


@dataclass(frozen=True)
class Stretch:
    """Flat tokens `[first, last)` of one request; the state after them may be wanted."""

    first: int
    last: int
    slot: int
    snapshot: Snapshot | None = None


class LiveStates:
    """One state for each slot. Legend: S slots, L recurrent layers, X numbers of one layer's state."""

    def __init__(
        self, heads: DeltaRule, num_layers: int, max_sequences: int, layout: KVLayout, device: torch.device
    ) -> None:
        shape = max_sequences, num_layers, heads.state_numbers
        self._live_SLX = torch.zeros(shape, dtype=torch.float32, device=device)
        assert self._live_SLX[0].nbytes == layout.state_bytes, "a snapshot is one slot of all layers"
        self._layout = layout
        self.layers = [State.of(self._live_SLX[:, layer], heads) for layer in range(num_layers)]

    @property
    def max_sequences(self) -> int:
        return self._live_SLX.shape[0]

    def plan(self, placed: Sequence[tuple[int, Chunk]]) -> Recurrence:
        """Plans a batch. `placed`: chunks with the flat index of their first token, those that `steps` first."""
        slots = [chunk.slot for _, chunk in placed]
        assert len(set(slots)) == len(slots), "each request of a batch has a live state of its own"
        assert all(0 <= slot < self.max_sequences for slot in slots), "slots lie among those the engine has"
        singles = [chunk.slot for _, chunk in placed if steps(chunk)]
        plan = Recurrence(self, torch.tensor(singles, dtype=torch.int64, device=self._live_SLX.device))
        for first, chunk in placed:
            if chunk.restore:
                plan.restores.append((chunk.slot, chunk.restore))
            elif chunk.start == 0:
                plan.fresh.append(chunk.slot)
            if not steps(chunk):
                plan.stretches += self._stretches(first, chunk)
        return plan

    def _stretches(self, first: int, chunk: Chunk) -> list[Stretch]:
        """A chunk, cut where a snapshot is taken."""
        found, at = [], chunk.start
        for position, blocks in chunk.snapshots:
            assert at < position <= chunk.stop, "snapshots lie inside their chunk, in order"
            flat = first + at - chunk.start
            found.append(Stretch(flat, flat + position - at, chunk.slot, self._snapshot(blocks)))
            at = position
        if at < chunk.stop:
            found.append(Stretch(first + at - chunk.start, first + len(chunk.tokens), chunk.slot))
        return found

    def _snapshot(self, blocks: tuple[int, ...]) -> Snapshot:
        layout, live = self._layout, self._live_SLX
        assert len(blocks) == layout.state_blocks, "a snapshot has its number of blocks"
        data = torch.zeros(layout.state_blocks * layout.block_bytes, dtype=torch.uint8, device=live.device)
        numbers = data[: layout.state_bytes].view(torch.float32).view(live.shape[1:])
        return Snapshot(blocks, data, numbers)

    def zero(self, slots: Sequence[int]) -> None:
        self._live_SLX[list(slots)] = 0.0

    def restore(self, slot: int, data: Tensor) -> None:
        """A snapshot's blocks as bytes become the state of a slot."""
        live = self._live_SLX[slot]
        live.copy_(data[: self._layout.state_bytes].clone().view(torch.float32).view(live.shape))

    def take(self, snapshot: Snapshot, layer: int, slot: int) -> None:
        """One layer's part of a snapshot: its state as it is now."""
        snapshot.numbers_LX[layer] = self._live_SLX[slot, layer]


def steps(chunk: Chunk) -> bool:
    """Whether a chunk goes one step with others like it, not in a run of its own."""
    return len(chunk.tokens) == 1 and not chunk.snapshots


@dataclass
class Recurrence:
    """A batch's plan for live states: zero `fresh` slots and fill `restores` from blocks; then one step each for the
    first `num_steps` flat tokens, at `slots_R`, and runs over the stretches, which follow in flat order."""

    states: LiveStates
    slots_R: Tensor
    stretches: list[Stretch] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    restores: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return self.slots_R.shape[0]

    def begin(self, memory: KVMemory) -> None:
        """Zeroes or restores live states. May be repeated until the first layer runs."""
        if self.fresh:
            self.states.zero(self.fresh)
        for slot, blocks in self.restores:
            self.states.restore(slot, memory.read_blocks(blocks))

    def finish(self, memory: KVMemory) -> None:
        """Writes snapshots to their blocks, after all layers."""
        for stretch in self.stretches:
            if stretch.snapshot is not None:
                memory.write_blocks(stretch.snapshot.blocks, stretch.snapshot.data)

    @property
    def only_steps(self) -> bool:
        """Whether each token goes one step from its live state, and that is all."""
        return not (self.stretches or self.fresh or self.restores)

    def within(self, first: int, stop: int) -> Recurrence:
        """Plan of these flat tokens, in a batch of steps only."""
        assert self.only_steps, "a prompt's tokens stay together"
        return Recurrence(self.states, self.slots_R[first:stop])

    def advance(self) -> None:
        """The next iteration of a batch of decodes: each goes on from its own state, and none is written out."""
        if self.stretches:
            slots = [stretch.slot for stretch in self.stretches]
            self.slots_R = torch.cat((self.slots_R, torch.tensor(slots, device=self.slots_R.device)))
        self.stretches, self.fresh, self.restores = [], [], []
