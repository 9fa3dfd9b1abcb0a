"""Shared by the engine's tests: explicit formulas to compare with, and small ways to run an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.live.engine.batch import Chunk
from isthmus.live.engine.engine import Engine, EngineOptions

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


def poison(engine: Engine) -> None:
    """Fills the KV memory with NaN: whoever reads a slot before it is written shows it."""
    for layer in engine.memory.layers:
        layer.fill_(NAN)


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
