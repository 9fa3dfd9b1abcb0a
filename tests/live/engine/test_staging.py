"""The way through pinned memory, with a device that is this host: what goes where, in however many parts.

Streams and events only order work there; on a machine with a CUDA device, test_kv runs the real thing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.live.engine import kv
from isthmus.live.engine.kernels.plain import PlainKernels
from isthmus.live.engine.kv import Staging

from .support import permutation

SIZE, NUM_BLOCKS = 24, 40


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)

    def synchronize(self) -> None: ...


class FakeEvent:
    def __init__(self) -> None:
        self.recorded = self.waited = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        """A half is never used again before its last copy was waited for."""
        self.waited = self.recorded


@pytest.fixture(autouse=True)
def _this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def unpinned(*shape: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(kv, "STAGE_BYTES", 4 * SIZE)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 30])
def test_any_number_of_blocks_goes_to_its_places_and_back(count: int) -> None:
    layers = [torch.zeros(NUM_BLOCKS, SIZE, dtype=torch.uint8) for _ in range(2)]
    one = Staging(layers, PlainKernels())
    arena = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * SIZE + 7, dtype=np.uint8)
    blocks = np.asarray(permutation(NUM_BLOCKS, seed=1)[:count], np.int64)
    offsets = 7 + SIZE * np.asarray(permutation(NUM_BLOCKS, seed=2)[:count], np.int64)
    one.fill(1, blocks, arena, offsets)
    expected = np.zeros((NUM_BLOCKS, SIZE), np.uint8)
    for block, at in zip(blocks, offsets, strict=True):
        expected[block] = arena[at : at + SIZE]
    assert (layers[1].numpy() == expected).all() and not layers[0].any()

    saved, right = np.zeros_like(arena), np.zeros_like(arena)
    one.written(1)
    one.save(1, blocks, saved, offsets)
    for at in offsets:
        right[at : at + SIZE] = arena[at : at + SIZE]
    assert (saved == right).all()
    assert one._stream.waited == [one._written[1]]
    assert all(event.waited == event.recorded for event in one._copied)
