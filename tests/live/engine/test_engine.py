from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.engine.batch import BatchTensors, Chunk
from isthmus.live.engine.engine import Engine, EngineOptions

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
    assert Engine(folder, options(kv_bytes=2 * BLOCK_BYTES)).num_blocks == 2
    with pytest.raises(StartError, match=str(2 * BLOCK_BYTES)):
        Engine(folder, options(kv_bytes=2 * BLOCK_BYTES - 1))


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


def test_only_the_slots_of_the_tokens_are_written(engine: Engine) -> None:
    poison(engine)
    blocks = permutation(40)
    engine.forward(engine.build([Chunk(tokens_of(21), 0, blocks, True), Chunk([5], 0, blocks[5:], True)]))
    written = [blocks[at // 16] * 16 + at % 16 for at in range(21)] + [blocks[5] * 16]
    for layer in engine.memory.layers:
        whole = ~layer.isnan().flatten(1).any(dim=1)
        assert whole.nonzero().flatten().tolist() == sorted(written)


# ---- before_layer


def memory_bits(engine: Engine) -> list[torch.Tensor]:
    return [layer.view(torch.uint8).clone() for layer in engine.memory.layers]


def mixed_batch(engine: Engine) -> BatchTensors:
    """A long chunk and two that are computed as rows."""
    chunks = [
        Chunk(tokens_of(30), 0, [3, 4], True),
        Chunk(tokens_of(3), 0, [9], True),
        Chunk([7], 0, [11], True),
    ]
    return engine.build(chunks)


def test_before_layer_is_called_before_the_kv_of_that_layer_is_touched(engine: Engine) -> None:
    poison(engine)
    calls: list[tuple[str, int]] = []

    def before(layer: int) -> None:
        calls.append(("before", layer))
        untouched = [bool(memory.isnan().all()) for memory in engine.memory.layers]
        assert untouched == [index >= layer for index in range(3)]

    engine.forward(mixed_batch(engine), lambda layer: calls.append(("on", layer)), before)
    assert calls == [(name, layer) for layer in range(3) for name in ("before", "on")]


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_before_layer_broke_off_can_be_repeated(
    folder_of: FolderOf, broken: int, dtype: str
) -> None:
    engine = Engine(folder_of("llama"), options(dtype=dtype))
    poison(engine)
    expected, bits = engine.forward(mixed_batch(engine)), memory_bits(engine)
    poison(engine)
    batch, announced = mixed_batch(engine), list[int]()

    def before(layer: int) -> None:
        if layer == broken:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.forward(batch, announced.append, before)
    assert announced == list(range(broken))
    assert torch.equal(engine.forward(batch, announced.append), expected)
    assert announced == [*range(broken), *range(3)]
    for found, right in zip(memory_bits(engine), bits, strict=True):
        assert torch.equal(found, right)


def test_a_prefix_may_come_layer_by_layer_while_the_rest_is_computed(folder_of: FolderOf) -> None:
    """Saved by one engine as its layers are computed, filled into another by a second thread while it computes."""
    source, target = (Engine(folder_of("llama"), options()) for _ in range(2))
    tokens, layout = tokens_of(60), source.layout
    arena, slots = memoryview(bytearray(5 * layout.block_bytes)), (4, 0, 2)

    def offsets(layer: int) -> list[int]:
        return [slot * layout.block_bytes + layer * layout.slice_bytes for slot in slots]

    def store(layer: int) -> None:
        source.memory.save(layer, [7, 1, 30], arena, offsets(layer))

    whole = source.build([Chunk(tokens[:48], 0, [7, 1, 30, 8], False)])
    source.step(whole, [], on_layer=store)
    expected = source.forward(source.build([Chunk(tokens[48:], 48, [7, 1, 30, 8], True)]))
    poison(target)
    with ThreadPoolExecutor(1) as loader:
        loads = [
            loader.submit(target.memory.fill, layer, [9, 2, 0], arena.toreadonly(), offsets(layer))
            for layer in range(3)
        ]
        batch = target.build([Chunk(tokens[48:], 48, [9, 2, 0, 5], True)])
        found = target.forward(batch, before_layer=lambda layer: loads[layer].result())
    assert torch.equal(found, expected)
