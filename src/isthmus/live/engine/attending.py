"""An engine with KV memory that computes attention over it, for engines that compute the rest: it keeps no weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from isthmus.core.blocks import KVLayout
from isthmus.live.engine import kernels
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.engine import EngineOptions, device_of, num_blocks_of
from isthmus.live.engine.interface import HolderQueries
from isthmus.live.engine.kv import TORCH_DTYPES, KVMemory
from isthmus.live.engine.recipe import kv_layout, read_spec
from isthmus.live.engine.remote import answer_to, queries_of, shapes_of, split_of
from isthmus.live.engine.weights import load_weights


class AttentionEngine:
    """`isthmus.live.engine.interface.Engine` of one model, whose steps other engines take. Blocks are named alike: the
    weights are read once, for their digest."""

    def __init__(self, model: Path, options: EngineOptions) -> None:
        """`model`: a folder, or a GGUF file."""
        if options.threads:
            torch.set_num_threads(options.threads)
        spec = read_spec(model)
        dtype = options.dtype or spec.dtype
        self.device = device_of(options.device)
        self.max_length = min(options.max_length or spec.max_length, spec.max_length)
        self.layout: KVLayout = kv_layout(spec, dtype, options.block_size)
        self.layers, self.vocab_size = (0, spec.num_layers), spec.vocab_size
        self._kernels, stored = kernels.select(self.device), TORCH_DTYPES[dtype]
        self._shapes = shapes_of(spec, self.layers)
        self.revision = load_weights(
            model, spec, dtype=stored, activations=stored, device=torch.device("meta"), layers=self.layers
        ).revision
        num_blocks = num_blocks_of(options, self.layout)
        self.memory = KVMemory(self.layout, num_blocks, self.device, self._kernels)
        self.constraints = Constraints(model, spec.vocab_size)

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def products(self) -> tuple[str, ...]:
        return ()

    def attend(self, layer: int, asked: Sequence[HolderQueries], q: memoryview, parts: int = 1) -> memoryview:
        """See `isthmus.live.engine.interface.Engine`."""
        kv, shape = split_of(self.memory.layers[layer], self._shapes[layer], parts)
        with torch.inference_mode():
            return answer_to(
                asked, queries_of(q, shape, asked), kv, self.layout.block_size, shape, self._kernels
            )

    def build(self, *_: object) -> NoReturn:
        raise AssertionError("a node of role attention computes no tokens")

    step = relay = directions = build
