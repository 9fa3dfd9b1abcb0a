from __future__ import annotations

import pytest
import torch

from isthmus.engine.batch import Chunk
from isthmus.engine.engine import Engine, EngineOptions
from isthmus.errors import ConfigError, StartError

from .conftest import FolderOf
from .support import permutation, poison, tokens_of

BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
"""Layers, tokens, K and V, KV heads, head size, bytes of a float32: the plain llama case."""


def options(**fields: object) -> EngineOptions:
    return EngineOptions(**({"device": "cpu", "kv_bytes": 40 * BLOCK_BYTES} | fields))


@pytest.fixture(scope="module")
def engine(folder_of: FolderOf) -> Engine:
    return Engine(folder_of("llama"), options())


def test_memory_holds_as_many_whole_blocks_as_fit(folder_of: FolderOf) -> None:
    folder = folder_of("llama")
    assert Engine(folder, options(kv_bytes=7 * BLOCK_BYTES)).num_blocks == 7
    assert Engine(folder, options(kv_bytes=8 * BLOCK_BYTES - 1)).num_blocks == 7
    assert Engine(folder, options(kv_bytes=7 * BLOCK_BYTES, dtype="bfloat16")).num_blocks == 14
    assert Engine(folder, options(kv_bytes=7 * BLOCK_BYTES, block_size=8)).num_blocks == 14


def test_memory_for_fewer_than_two_blocks_is_refused_with_the_least_that_will_do(folder_of: FolderOf) -> None:
    with pytest.raises(StartError, match=str(2 * BLOCK_BYTES)):
        Engine(folder_of("llama"), options(kv_bytes=2 * BLOCK_BYTES - 1))
    assert Engine(folder_of("llama"), options(kv_bytes=2 * BLOCK_BYTES)).num_blocks == 2


def test_the_length_is_limited_by_model_and_options(folder_of: FolderOf) -> None:
    assert Engine(folder_of("llama"), options()).max_length == 4096
    assert Engine(folder_of("llama"), options(max_length=100)).max_length == 100
    assert Engine(folder_of("llama"), options(max_length=10_000)).max_length == 4096


def test_the_type_is_the_models_own_unless_stated(folder_of: FolderOf) -> None:
    for stated, dtype in ((None, torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        engine = Engine(folder_of("llama"), options(dtype=stated))
        assert {layer.dtype for layer in engine.memory.layers} == {dtype}
        assert engine.layout.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        Engine(folder_of("llama"), options(device="cuda"))


@pytest.mark.parametrize("count", [5, 40])
def test_a_batch_that_samples_nothing_has_no_logits_but_leaves_its_kv(engine: Engine, count: int) -> None:
    tokens, blocks = tokens_of(count + 1), permutation(40)
    whole = engine.forward(engine.build([Chunk(tokens, 0, blocks, True)]))
    poison(engine)
    nothing = engine.forward(engine.build([Chunk(tokens[:-1], 0, blocks, False)]))
    assert nothing.shape == (0, 272)
    last = engine.forward(engine.build([Chunk(tokens[-1:], count, blocks, True)]))
    assert torch.allclose(last, whole, rtol=1e-4, atol=1e-4)


def test_logits_are_float32_one_row_a_sample(engine: Engine) -> None:
    chunks = [Chunk(tokens_of(9), 0, [0], True), Chunk([1], 0, [1], False), Chunk([2], 0, [2], True)]
    logits = engine.forward(engine.build(chunks))
    assert logits.shape == (2, 272) and logits.dtype == torch.float32


def test_only_the_slots_of_the_tokens_are_written(engine: Engine) -> None:
    poison(engine)
    blocks = permutation(40)
    engine.forward(engine.build([Chunk(tokens_of(21), 0, blocks, True), Chunk([5], 0, blocks[5:], True)]))
    written = [blocks[at // 16] * 16 + at % 16 for at in range(21)] + [blocks[5] * 16]
    for layer in engine.memory.layers:
        whole = ~layer.isnan().flatten(1).any(dim=1)
        assert whole.nonzero().flatten().tolist() == sorted(written)


@pytest.mark.parametrize("count", [3, 30])
def test_on_layer_is_called_in_order_when_the_kv_of_that_layer_is_in_place(engine: Engine, count: int) -> None:
    poison(engine)
    seen: list[tuple[int, torch.Tensor]] = []
    batch = engine.build([Chunk(tokens_of(count), 0, [3, 4], True)])
    engine.forward(
        batch, lambda layer: seen.append((layer, engine.memory.layers[layer][48 : 48 + count].clone()))
    )
    assert [layer for layer, _ in seen] == [0, 1, 2]
    for layer, kv in seen:
        assert not kv.isnan().any()
        assert torch.equal(kv, engine.memory.layers[layer][48 : 48 + count])


def test_kv_computed_in_one_engine_serves_another(folder_of: FolderOf, engine: Engine) -> None:
    """What disaggregation rests on: prefill here, move the bytes, decode there."""
    tokens = tokens_of(38)
    expected = engine.forward(engine.build([Chunk(tokens, 0, [7, 1, 30], True)]))
    other = Engine(folder_of("llama"), options())
    poison(other)
    for layer in range(3):
        for source, target in ((7, 9), (1, 2), (30, 0)):
            first, stop = target * 16, target * 16 + 16
            landing = other.memory.landing(layer, first, stop)
            landing[:] = engine.memory.export(layer, source * 16, source * 16 + 16)
            other.memory.land(layer, first, stop, landing)
    found = other.forward(other.build([Chunk(tokens[-1:], 37, [9, 2, 0], True)]))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
