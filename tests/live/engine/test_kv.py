from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.core.blocks import KVLayout
from isthmus.live.engine.emulated import EmulatedMemory
from isthmus.live.engine.interface import KVBytes, runs_of
from isthmus.live.engine.kernels import Kernels
from isthmus.live.engine.kv import KVMemory

CPU = torch.device("cpu")


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """(blocks, block_size, start, stop): runs of neighbouring blocks, in any order."""
    firsts = draw(st.permutations([0, 10, 20, 30]))
    blocks = [first + offset for first in firsts for offset in range(draw(st.integers(0, 4)))]
    block_size = draw(st.integers(1, 17))
    start = draw(st.integers(0, len(blocks) * block_size))
    return blocks, block_size, start, draw(st.integers(start, len(blocks) * block_size))


@settings(max_examples=300)
@given(tables())
def test_runs_cover_the_positions_in_order_and_are_as_few_as_the_blocks_allow(
    table: tuple[list[int], int, int, int],
) -> None:
    blocks, size, start, stop = table
    runs = list(runs_of(blocks, size, start, stop))
    slots = [slot for first, last in runs for slot in range(first, last)]
    assert slots == [blocks[at // size] * size + at % size for at in range(start, stop)]
    assert all(first < last for first, last in runs)
    assert all(left[1] != right[0] for left, right in pairwise(runs))


def memory_of(dtype: str, *, fill: bool) -> KVMemory:
    layout = KVLayout(dtype=dtype, block_size=4, num_layers=2, num_kv_heads=3, head_dim=6)
    memory = KVMemory(layout, 5, CPU)
    if fill:
        generator = torch.Generator().manual_seed(0)
        for layer in memory.layers:
            # Any bits at all, NaN of every kind included: what is moved is bytes.
            raw = layer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    return memory


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_the_bytes_of_the_slots(dtype: str) -> None:
    memory = memory_of(dtype, fill=True)
    for layer in range(2):
        for first, stop in ((0, 20), (3, 9), (19, 20)):
            data = memory.export(layer, first, stop)
            assert data.nbytes == (stop - first) * memory.layout.token_bytes
            assert bytes(data) == raw(memory.layers[layer][first:stop])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_lands_elsewhere_byte_for_byte_and_nowhere_else(dtype: str) -> None:
    source, target = memory_of(dtype, fill=True), memory_of(dtype, fill=False)
    for layer in range(2):
        data = source.export(layer, 5, 12)
        landing = target.landing(layer, 2, 9)
        landing[:] = data
        target.land(layer, 2, 9, landing)
        found = target.layers[layer]
        assert raw(found[2:9]) == raw(source.layers[layer][5:12])
        assert not found[:2].any() and not found[9:].any()


# ---- blocks in bulk

LAYOUT = KVLayout(dtype="float32", block_size=4, num_layers=2, num_kv_heads=2, head_dim=3)
SIZE = LAYOUT.slice_bytes
DEVICES = ["emulated", "cpu", "cpu-native", "cuda"]


@pytest.fixture(params=DEVICES)
def memory(request: pytest.FixtureRequest) -> KVBytes:
    """Memory of 9 blocks, zeros."""
    if request.param == "emulated":
        return EmulatedMemory(LAYOUT, 9)
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    kernels: Kernels | None = None
    if request.param == "cpu-native":
        kernels = request.getfixturevalue("native_kernels")
    return KVMemory(LAYOUT, 9, torch.device(request.param.removesuffix("-native")), kernels)


def contents(memory: KVBytes, layer: int) -> bytes:
    return bytes(memory.export(layer, 0, 9 * LAYOUT.block_size))


def noise(count: int, seed: int) -> bytes:
    return Random(seed).randbytes(count)


@st.composite
def moves(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(blocks, offsets): some of the 9 blocks, and as many places that do not overlap in an arena of 20 slices."""
    blocks = draw(st.lists(st.integers(0, 8), unique=True))
    gaps = draw(st.lists(st.integers(0, SIZE), min_size=len(blocks), max_size=len(blocks)))
    places = [sum(gaps[: at + 1]) + at * SIZE for at in range(len(blocks))]
    return blocks, draw(st.permutations(places))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves(), st.integers(0, 1))
def test_blocks_are_filled_from_their_places_in_the_arena_and_saved_to_them(
    memory: KVBytes, move: tuple[list[int], list[int]], layer: int
) -> None:
    blocks, offsets = move
    before, other = contents(memory, layer), contents(memory, 1 - layer)
    arena = noise(20 * SIZE, len(blocks))
    memory.fill(layer, blocks, memoryview(arena), offsets)
    expected = bytearray(before)
    for block, at in zip(blocks, offsets, strict=True):
        expected[block * SIZE : (block + 1) * SIZE] = arena[at : at + SIZE]
    assert contents(memory, layer) == expected
    assert contents(memory, 1 - layer) == other

    saved, right = bytearray(noise(20 * SIZE, 99)), bytearray(noise(20 * SIZE, 99))
    if isinstance(memory, KVMemory):
        memory.written(layer)
    memory.save(layer, blocks, memoryview(saved), offsets)
    for block, at in zip(blocks, offsets, strict=True):
        right[at : at + SIZE] = expected[block * SIZE : (block + 1) * SIZE]
    assert saved == right


@pytest.mark.parametrize(
    ("blocks", "offsets"), [([9], [0]), ([-1], [0]), ([0], [-1]), ([0], [2 * SIZE + 1]), ([0, 1], [0])]
)
def test_what_lies_outside_is_refused_before_a_byte_is_moved(
    memory: KVBytes, blocks: list[int], offsets: list[int]
) -> None:
    arena = memoryview(bytearray(noise(3 * SIZE, 1)))
    for move in (memory.fill, memory.save):
        with pytest.raises(AssertionError):
            move(0, blocks, arena, offsets)
    assert not any(contents(memory, 0)) and bytes(arena) == noise(3 * SIZE, 1)


def test_blocks_are_not_saved_to_memory_that_is_only_read(memory: KVBytes) -> None:
    with pytest.raises((AssertionError, TypeError)):
        memory.save(0, [0], memoryview(bytes(SIZE)), [0])
