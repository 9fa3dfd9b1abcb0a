"""An engine with KV memory that computes attention over it, for engines that compute the rest: it keeps no weights."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch

from isthmus.live.engine.engine import EngineOptions, KVEngine
from isthmus.live.engine.weights import load_weights


class AttentionEngine(KVEngine):
    """`isthmus.live.engine.interface.Engine` of one model, whose steps other engines take. The weights are read once,
    for the digest that names blocks."""

    products: tuple[str, ...] = ()

    def __init__(self, model: Path, options: EngineOptions) -> None:
        super().__init__(model, options)
        meta = torch.device("meta")
        self.revision = load_weights(
            model, self.spec, dtype=self.stored, activations=self.stored, device=meta
        ).revision
        self.memory = self._new_memory()

    def build(self, *_: object) -> NoReturn:
        raise AssertionError("a node of role attention computes no tokens")

    step = relay = directions = build
