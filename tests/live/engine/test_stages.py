"""A model in pipeline stages computes, bit for bit, what it computes in one piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ConfigError, ProtocolError
from isthmus.core.types import Sampling
from isthmus.live.engine.batch import BatchTensors, Chunk
from isthmus.live.engine.engine import Engine
from isthmus.live.engine.interface import Hidden, Row, split_layers
from tests.models import MODEL_CASES
from tests.soak import matrix

from .conftest import FolderOf
from .support import engine_of, permutation, tokens_of

NUM_BLOCKS = 40
GREEDY = Row(Sampling(temperature=0.0), ())


def engines_of(folder: Path, stages: int, dtype: str = "float32") -> list[Engine]:
    return [
        engine_of(folder, dtype=dtype, layers=layers, kv_bytes=NUM_BLOCKS << 17)
        for layers in split_layers(3, stages)
    ]


def crossed(hidden: Hidden) -> Hidden:
    """What arrives at the other side of a wire: shape, type and bytes, in memory that nobody may write."""
    return Hidden(hidden.shape, hidden.dtype, memoryview(bytes(hidden.data)))


def logits_of(stages: list[Engine], batches: list[BatchTensors]) -> torch.Tensor:
    """One iteration through the stages; each has a batch of its own."""
    hidden = None
    for engine, batch in zip(stages[:-1], batches[:-1], strict=True):
        hidden = crossed(engine.relay(batch, hidden=hidden))
    return stages[-1].forward(batches[-1], hidden=hidden)


def iterations() -> list[list[Chunk]]:
    """A prompt in two chunks beside others: long chunks, short ones that are computed as rows, single tokens."""
    blocks = permutation(NUM_BLOCKS, seed=3)
    one, two, three = (tokens_of(80, seed=seed) for seed in (1, 2, 3))
    tables = blocks[:6], blocks[6:12], blocks[12:18]
    return [
        [Chunk(one[:50], 0, tables[0], False), Chunk(two[:5], 0, tables[1], True)],
        [Chunk(one[50:], 50, tables[0], True), Chunk(two[5:6], 5, tables[1], True), Chunk(three, 0, tables[2], True)],
        [Chunk([1], 80, tables[0], True), Chunk([2], 6, tables[1], True), Chunk([3], 80, tables[2], True)],
    ]  # fmt: skip


def assert_same_bits(whole: Engine, stages: list[Engine]) -> None:
    for chunks in iterations():
        expected = whole.forward(whole.build(chunks))
        assert torch.equal(logits_of(stages, [engine.build(chunks) for engine in stages]), expected)
    memory = [layer for engine in stages for layer in engine.memory.layers]
    for mine, theirs in zip(memory, whole.memory.layers, strict=True):
        slots = min(len(mine), len(theirs))  # a stage has room for more blocks in as many bytes
        assert torch.equal(mine[:slots].view(torch.uint8), theirs[:slots].view(torch.uint8))


@matrix("case, num_stages", [*MODEL_CASES, "deepseek_v3"], [2, 3])
def test_logits_and_kv_are_those_of_one_engine_bit_for_bit(
    folder_of: FolderOf, case: str, num_stages: int
) -> None:
    folder = folder_of(case)
    assert_same_bits(*engines_of(folder, 1), engines_of(folder, num_stages))


@pytest.mark.parametrize("case", ["llama-tied", "qwen3-bias-yarn-window"])
@pytest.mark.usefixtures("selected")
def test_in_bfloat16_too(folder_of: FolderOf, case: str) -> None:
    assert_same_bits(*engines_of(folder_of(case), 1, "bfloat16"), engines_of(folder_of(case), 3, "bfloat16"))


@pytest.mark.parametrize("case", ["llama", "qwen2-tied-shards"])
def test_stages_name_blocks_like_the_whole_model_and_hold_only_their_layers(
    folder_of: FolderOf, case: str
) -> None:
    (whole,) = engines_of(folder_of(case), 1)
    stages = engines_of(folder_of(case), 2)
    assert [engine.layers for engine in stages] == [(0, 2), (2, 3)]
    for engine, num_layers in zip(stages, (2, 1), strict=True):
        assert (engine.revision, engine.layout) == (whole.revision, whole.layout)
        assert len(engine.memory.layers) == engine.memory.layout.num_layers == num_layers
        assert engine.num_blocks == (NUM_BLOCKS << 17) // engine.memory.layout.block_bytes


def test_a_stage_keeps_no_weights_of_others(folder_of: FolderOf) -> None:
    for case, tied in (("llama", False), ("llama-tied", True)):
        first, middle, last = (engine.model._weights for engine in engines_of(folder_of(case), 3))
        assert [len(weights.layers) for weights in (first, middle, last)] == [1, 1, 1]
        assert first.embedding is not None and first.head is None and first.final_norm is None
        assert middle.embedding is None and middle.head is None and middle.final_norm is None
        assert last.embedding is None and last.head is not None and last.final_norm is not None
        for weights in (first, middle, last):
            assert not weights.layers[0].mlp.down.weight.is_meta
        assert last.head is not None and torch.equal(last.head.weight, first.embedding) is tied


def test_hidden_states_are_taken_as_bytes_and_left_as_they_came(folder_of: FolderOf) -> None:
    first, last = engines_of(folder_of("llama"), 2)
    chunk = Chunk(tokens_of(20), 0, [0, 1], True)
    hidden = first.relay(first.build([chunk]))
    assert (hidden.shape, hidden.dtype, hidden.data.nbytes) == ((20, 64), "float32", 20 * 64 * 4)
    # A receiver's buffer: writable, and not aligned to anything.
    buffer = bytearray(b"?" + bytes(hidden.data))
    received = Hidden(hidden.shape, hidden.dtype, memoryview(buffer)[1:])
    expected = last.forward(last.build([chunk]), hidden=hidden)
    assert torch.equal(last.forward(last.build([chunk]), hidden=received), expected)
    assert buffer[1:] == hidden.data


def test_layers_are_numbered_from_the_stages_own_first(folder_of: FolderOf) -> None:
    first, last = engines_of(folder_of("llama"), 2)
    chunk, calls = Chunk(tokens_of(20), 0, [0, 1], True), list[tuple[str, int]]()

    def on_layer(layer: int) -> None:
        calls.append(("on", layer))

    def before_layer(layer: int) -> None:
        calls.append(("before", layer))

    hidden = first.relay(first.build([chunk]), on_layer, before_layer)
    last.step(last.build([chunk]), [GREEDY], on_layer, before_layer, hidden)
    assert calls == [(name, layer) for layer in (0, 1, 0) for name in ("before", "on")]


def test_an_iteration_of_a_stage_that_was_broken_off_can_be_repeated(folder_of: FolderOf) -> None:
    (whole,), (first, last) = (engines_of(folder_of("llama"), stages) for stages in (1, 2))
    chunk = Chunk(tokens_of(20), 0, [0, 1], True)
    expected = whole.forward(whole.build([chunk]))

    def gone(layer: int) -> None:
        raise ConnectionError

    batch = first.build([chunk])
    with pytest.raises(ConnectionError):
        first.relay(batch, before_layer=gone)
    hidden, batch = first.relay(batch), last.build([chunk])
    with pytest.raises(ConnectionError):
        last.forward(batch, before_layer=gone, hidden=hidden)
    assert torch.equal(last.forward(batch, hidden=hidden), expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [((20, 64), "float32", 5119), ((20, 64), "bfloat16", 5120), ((19, 64), "float32", 4864)],
)
def test_hidden_states_that_do_not_fit_the_batch_are_a_peers_error(
    folder_of: FolderOf, shape: tuple[int, ...], dtype: str, size: int
) -> None:
    _, last = engines_of(folder_of("llama"), 2)
    batch = last.build([Chunk(tokens_of(20), 0, [0, 1], True)])
    with pytest.raises(ProtocolError, match=f"{size} bytes .*needs 5120"):
        last.step(batch, [GREEDY], hidden=Hidden(shape, dtype, memoryview(bytes(size))))


@settings(max_examples=200)
@given(st.integers(1, 80), st.data())
def test_a_split_is_whole_and_even(num_layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, num_layers))
    ranges = split_layers(num_layers, stages)
    assert [layer for first, stop in ranges for layer in range(first, stop)] == list(range(num_layers))
    sizes = [stop - first for first, stop in ranges]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("stages", [0, 4])
def test_a_split_with_an_empty_stage_is_refused(stages: int) -> None:
    with pytest.raises(ConfigError, match=f"3 layers makes 1 to 3 pipeline stages, not {stages}"):
        split_layers(3, stages)
