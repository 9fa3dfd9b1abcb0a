"""Shared by the engine's tests: explicit formulas to compare with, and small ways to run an engine."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.live.engine.batch import Chunk
from isthmus.live.engine.emulated import EmulatedEngine
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.interface import Asking, HolderLost, HolderQueries
from tests.served import LIMIT_S

NAN = float("nan")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 272, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def permutation(count: int, seed: int = 0) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected. NaN anywhere gives infinity."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")


def largest_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude expected (at least 1). NaN anywhere gives infinity."""
    if expected.numel() == 0:
        return 0.0
    scale = max(1.0, float(expected.double().abs().max()))
    error = float((found.double() - expected.double()).abs().max()) / scale
    return error if error == error else float("inf")


def attention(q_THD: Tensor, kv_L2KD: Tensor, visible_TL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention by its definition in float64, every key repeated for its group of query heads.

    Only for scores that `exp` can take as they are. Queries that see nothing: out 0, lse -inf.
    """
    q, kv = q_THD.double(), kv_L2KD.double()
    group = q.shape[1] // kv.shape[2]
    k, v = (kv[:, side].repeat_interleave(group, dim=1) for side in (0, 1))
    weights_THL = torch.einsum("thd,lhd->thl", q, k).mul(scale).exp() * visible_TL[:, None]
    sums_TH = weights_THL.sum(dim=-1)
    out = torch.einsum("thl,lhd->thd", weights_THL, v) / sums_TH.clamp(min=1e-300)[..., None]
    return out, sums_TH.log()


def visible(num_queries: int, num_keys: int, causal_from: int | None, window: int = 0) -> Tensor:
    """Which keys of a piece each query sees, entry by entry."""

    def sees(query: int, key: int) -> bool:
        if causal_from is None:
            return True
        own = causal_from + query
        return key <= own and not (window and key <= own - window)

    rows = [[sees(query, key) for key in range(num_keys)] for query in range(num_queries)]
    return torch.tensor(rows, dtype=torch.bool).view(num_queries, num_keys)


def engine_of(folder: Path, **options: Any) -> Engine:
    """In float32 on the CPU, unless said otherwise; whoever reads memory before it is written shows it."""
    given = {"device": "cpu", "dtype": "float32", "kv_bytes": 1 << 22, "max_sequences": 4} | options
    engine = Engine(folder, EngineOptions(**given))
    poison(engine)
    return engine


def poison(engine: Engine) -> None:
    """Fills KV and live states with NaN."""
    for layer in engine.memory.layers:
        layer.fill_(NAN)
    if engine.states is not None:
        engine.states._live_SLX.fill_(NAN)


def logits_by_position(
    engine: Engine, tokens: Sequence[int], blocks: Sequence[int], chunk: int, start: int = 0
) -> dict[int, Tensor]:
    """Computes tokens from position `start` on, `chunk` at a time: position of each chunk's end -> logits."""
    found = {}
    for at in range(start, len(tokens), chunk):
        piece = Chunk(tokens[at : at + chunk], at, blocks, True)
        found[piece.stop - 1] = engine.forward(engine.build([piece]))[0]
    return found


def answer_of(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """Greedily, token by token."""
    blocks, known, position, answer = list(range(12)), prompt, 0, list[int]()
    for _ in range(count):
        [logits] = engine.forward(engine.build([Chunk(known, position, blocks, True)]))
        position += len(known)
        known = [int(logits.argmax())]
        answer += known
    return answer


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a folder with one file of weights."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def refusal(path: Path) -> str:
    """The one line that says why an engine takes no such model, with the path."""
    with pytest.raises(ModelError) as caught:
        Engine(path, EngineOptions(device="cpu", kv_bytes=1 << 22))
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def changed(content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """`content` with some fields replaced; a field given as None is removed."""
    return {key: value for key, value in (content | fields).items() if value is not None}


Event = tuple[str, int, int, str]
"""What, in which layer, for which first chunk, by which thread."""


class Others:
    """Engines that attend in threads of their own, from when they are asked. `tables`: of each chunk, its blocks at
    each of them. `late`: runs before each of their answers; `gone`: who does not answer from which layer on. `sent` and
    `received`: bytes of each question and answer."""

    def __init__(
        self, engines: Mapping[str, Engine | EmulatedEngine], tables: list[dict[str, list[int]]]
    ) -> None:
        self.engines, self.tables = engines, tables
        # One for each question on its way: what waits for all must not keep the last of them from being asked.
        self.threads = ThreadPoolExecutor(4 * len(tables), "holder")
        self.asked: dict[tuple[int, Asking], Future[memoryview]] = {}
        self.log: list[Event] = []
        self.sent, self.received = list[int](), list[int]()
        self.late: Callable[[int], object] = lambda layer: None
        self._changed, self._asking = threading.Condition(), defaultdict[int, set[int]](set)
        self.gone: tuple[str, int] | None = None

    def ask(self, layer: int, asking: Asking, q: memoryview) -> None:
        self._note("ask", layer, asking)
        self.sent.append(q.nbytes)
        self.asked[layer, asking] = self.threads.submit(self._attend, layer, asking, bytes(q))

    def answer(self, layer: int, asking: Asking) -> memoryview:
        if self.gone is not None and asking.holder == self.gone[0] and layer >= self.gone[1]:
            raise HolderLost(asking.holder, "gone")
        answer = self.asked.pop((layer, asking)).result()
        self._note("answer", layer, asking)
        self.received.append(answer.nbytes)
        return answer

    def _note(self, what: str, layer: int, asking: Asking) -> None:
        with self._changed:
            self.log.append((what, layer, asking.chunks[0][0], threading.current_thread().name))
            self._asking[layer] |= {index for index, *_ in asking.chunks}
            self._changed.notify_all()

    def await_all(self, layer: int) -> None:
        """Until every chunk that has KV here has asked in a layer."""
        asking = {index for index, tables in enumerate(self.tables) if tables}
        with self._changed:
            assert self._changed.wait_for(lambda: self._asking[layer] == asking, LIMIT_S)

    def _attend(self, layer: int, asking: Asking, q: bytes) -> memoryview:
        self.late(layer)
        asked = [
            HolderQueries(self.tables[index][asking.holder], rows, num_tokens, first, position)
            for index, rows, num_tokens, first, position in asking.chunks
        ]
        return self.engines[asking.holder].attend(layer, asked, memoryview(bytearray(q)), asking.parts)


def copy_heads(
    home: Engine, blocks: Sequence[int], holder: Engine, first: int, part: int, parts: int
) -> list[int]:
    """Copies a part of the KV heads of some blocks to a holder, which has the other parts in the same memory: the
    blocks from `first` on there."""
    memory, size = holder.memory.split(parts), home.layout.block_size
    for new, block in enumerate(blocks, start=first):
        for layer in range(home.layout.num_layers):
            data = home.memory.export_heads(layer, block * size, (block + 1) * size, part, parts)
            memory.export(layer, new * size, (new + 1) * size)[:] = data
    return list(range(first, first + len(blocks)))
