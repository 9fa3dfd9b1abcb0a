"""One model on one device with its KV memory: chunks in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isthmus.blocks import KVLayout
from isthmus.engine import kernels
from isthmus.engine.batch import Batch, build_batch
from isthmus.engine.interface import Chunk, OnLayer, Row, Sampled
from isthmus.engine.kv import TORCH_DTYPES, KVMemory
from isthmus.engine.model import Model
from isthmus.engine.sampling import sample
from isthmus.engine.spec import ModelSpec, read_spec
from isthmus.engine.weights import load_weights
from isthmus.errors import ConfigError, StartError


@dataclass(frozen=True)
class EngineOptions:
    """`dtype`: None takes the model's own; `kv_bytes`: memory for KV; `max_length`: None takes the model's."""

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    block_size: int = 16
    kv_bytes: int = 1 << 30
    max_length: int | None = None


class Engine:
    """Owns weights and KV memory. Not thread-safe: one thread steps it."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self.spec: ModelSpec = read_spec(folder)
        self.device = _device(options.device)
        self.max_length = min(options.max_length or self.spec.max_length, self.spec.max_length)
        dtype = options.dtype or self.spec.dtype
        self.layout = KVLayout(
            dtype=dtype,
            block_size=options.block_size,
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
        )
        num_blocks = options.kv_bytes // self.layout.block_bytes
        if num_blocks < 2:
            raise StartError(
                f"engine.kv_memory {options.kv_bytes} bytes holds fewer than 2 blocks of "
                f"{self.layout.block_bytes} bytes; give at least {2 * self.layout.block_bytes}"
            )
        self.kernels = kernels.select(self.device)
        stored = TORCH_DTYPES[dtype]
        activations = self.kernels.activation_dtype(stored)
        weights = load_weights(folder, self.spec, dtype=stored, activations=activations, device=self.device)
        self.revision = weights.revision
        self.model = Model(self.spec, weights, self.kernels, self.max_length)
        self.memory = KVMemory(self.layout, num_blocks, self.device)

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        return build_batch(chunks, self.layout.block_size, self.device)

    def forward(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """Logits `[S, V]`, float32, one row for each chunk that samples, in `batch.order`."""
        with torch.inference_mode():
            return self.model.forward(batch, self.memory, on_layer)

    def step(self, batch: Batch, rows: Sequence[Row], on_layer: OnLayer | None = None) -> Sampled:
        return sample(self.forward(batch, on_layer), rows)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch finds no CUDA device here; use cpu")
    return torch.device(name)
