"""One model, or one pipeline stage of it, on one device with its KV memory: chunks in, logits out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isthmus.core.blocks import KVLayout
from isthmus.core.errors import ConfigError, ProtocolError, StartError
from isthmus.core.models import ModelSpec
from isthmus.live.engine import kernels
from isthmus.live.engine.assembling import Assembled, directions
from isthmus.live.engine.batch import BatchTensors, build_batch
from isthmus.live.engine.constraints import Constraints
from isthmus.live.engine.interface import (
    BeforeLayer,
    Chunk,
    Elsewhere,
    Hidden,
    HolderQueries,
    OnLayer,
    OnScores,
    Row,
    Sampled,
    stage_layout,
)
from isthmus.live.engine.kv import TORCH_DTYPES, KVMemory, bytes_of
from isthmus.live.engine.mixers import Pass
from isthmus.live.engine.model import Model
from isthmus.live.engine.program import Residual
from isthmus.live.engine.recipe import kv_layout, read_spec
from isthmus.live.engine.remote import answer_to, queries_of, shapes_of, split_of
from isthmus.live.engine.sampling import parts_of, sample, score
from isthmus.live.engine.states import LiveStates
from isthmus.live.engine.turns import BatchTurns, Team
from isthmus.live.engine.weights import Weights, load_weights
from isthmus.model_files.grammar_limits import GRAMMAR_LIMITS, GrammarLimits


@dataclass(frozen=True)
class EngineOptions:
    """How a model is run here. None takes the model's own, and of `device` and `threads` the machine's."""

    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    block_size: int = 16
    kv_bytes: int = 1 << 30  # for KV and live states
    max_length: int | None = None
    layers: tuple[int, int] | None = None  # half-open, of a pipeline stage (`split_layers`); None: all
    max_sequences: int = 64  # slots for live states, in models with recurrent layers
    batches: int | None = None  # take turns where KV lies elsewhere (`BatchTurns`)
    grammars: GrammarLimits = GRAMMAR_LIMITS


class Engine:
    """Owns weights and KV memory. Not thread-safe: one thread steps it."""

    def __init__(self, model: Path, options: EngineOptions) -> None:
        """`model`: a folder, or a GGUF file."""
        if options.threads:
            torch.set_num_threads(options.threads)
        self.spec: ModelSpec = read_spec(model)
        self.device = device_of(options.device)
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        self._team = Team(threads, torch.set_num_threads, time.perf_counter)
        self._turns = BatchTurns(options.batches, time.perf_counter)
        self.max_length = min(options.max_length or self.spec.max_length, self.spec.max_length)
        dtype = options.dtype or self.spec.dtype
        self.layout: KVLayout = kv_layout(self.spec, dtype, options.block_size)
        self.layers = options.layers or (0, self.spec.num_layers)
        layout = self._own_layout()
        num_blocks = num_blocks_of(options, layout)
        self.kernels = kernels.select(self.device)
        stored = TORCH_DTYPES[dtype]
        activations = self.kernels.activation_dtype(stored)
        weights = self._prepared(
            load_weights(
                model,
                self.spec,
                dtype=stored,
                activations=activations,
                device=self.device,
                layers=self.layers,
                groups=self.kernels.takes_groups and stored == torch.bfloat16,
            )
        )
        self.revision = weights.revision
        self.model = Model(self.spec, weights, self.kernels, self.max_length)
        self.memory = KVMemory(layout, num_blocks, self.device, self.kernels)
        self._shapes = shapes_of(self.spec, self.layers)
        self.states = self._live_states(options.max_sequences)
        self.constraints = Constraints(model, self.spec.vocab_size, options.grammars)

    def _prepared(self, weights: Weights) -> Weights:
        """As the kernels hold them; nothing else refers to what they were, so that it goes layer by layer."""
        layers, head = list(weights.layers), weights.head
        tied = head is not None and head.weight is weights.embedding
        weights = replace(weights, layers=())
        head = self.kernels.prepare(layers, head)
        embedding = head.weight if tied and head is not None else weights.embedding
        return replace(weights, embedding=embedding, layers=tuple(layers), head=head)

    def _own_layout(self) -> KVLayout:
        """Of the KV bytes here: in a stage those of its own layers."""
        if self.layers == (0, self.spec.num_layers):
            return self.layout
        if self.spec.recurrent:
            raise ConfigError(
                f"{self.spec.architecture} has recurrent layers; a pipeline needs a model whose layers all keep KV: "
                "serve this one without"
            )
        return stage_layout(self.layout, self.layers)

    def _live_states(self, max_sequences: int) -> LiveStates | None:
        recurrent = self.spec.recurrent
        if not recurrent:
            return None
        return LiveStates(recurrent[0], len(recurrent), max_sequences, self.layout, self.device)

    @property
    def num_blocks(self) -> int:
        return self.memory.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def products(self) -> tuple[str, ...]:
        return self.kernels.described()

    def build(self, chunks: Sequence[Chunk]) -> BatchTensors:
        size, blocks = self.layout.block_size, self.memory.num_blocks
        batch = build_batch(chunks, size, self.device, self.states, num_blocks=blocks)
        assembled = [index for index, chunk in enumerate(chunks) if chunk.assembling is not None]
        if assembled:
            batch.assembled = tuple([self._assembled(index, chunks[index]) for index in assembled])
            batch.order += [index for index in assembled if chunks[index].samples]
        return batch

    def directions(self) -> bytes:
        """See `isthmus.live.engine.interface.Engine`."""
        with torch.inference_mode():
            return directions(self.model.embed(torch.arange(self.vocab_size, device=self.device)))

    def _assembled(self, index: int, chunk: Chunk) -> Assembled:
        assert not self.spec.no_reuse and self.model.cos_sin is not None, (
            "prompts of this model are not assembled"
        )
        return Assembled(index, chunk, self.memory, self.model.cos_sin, self.model.embed)

    def forward(
        self,
        batch: BatchTensors,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
        on_scores: OnScores | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Tensor:
        """Logits `[S, V]`, float32, one row for each chunk that samples, in `batch.order`."""
        assert self.layers[1] == self.spec.num_layers, "the last stage samples"
        found = list[Tensor]()
        with self._iteration(batch):
            if batch.num_tokens:
                x_TN = self._taken(batch, hidden)
                # A layer is in place when it is so of all that pass.
                run = Pass(batch, self.memory, None if batch.assembled else on_layer, before_layer, elsewhere)
                residual = self.model.run_layers(x_TN, run, self._turns)
                found.append(self.model.logits(residual, batch))
                if on_scores is not None:
                    self._score(residual, batch, on_scores)
            for each in batch.assembled:
                last = each is batch.assembled[-1]
                run = each.begin(Pass(batch, self.memory, on_layer if last else None, before_layer))
                x_TN, delta_TN = self.model.run_layers(self.model.embed(run.batch.tokens_T), run)
                batch.reused[each.index] = each.finish()
                found.append(self.model.logits_of((x_TN[-1:].contiguous(), delta_TN[-1:].contiguous())))
            return found[0] if len(found) == 1 else torch.cat(found)

    def _score(self, residual: Residual, batch: BatchTensors, on_scores: OnScores) -> None:
        """The head is put on so many tokens at a time as bounds the memory. Changes `residual`."""
        x_TN, delta_TN = residual
        for part in parts_of(batch.scored, self.vocab_size):
            rows = slice(part.first, part.first + len(part.targets))
            logits_SV = self.model.logits_of((x_TN[rows], delta_TN[rows]))
            on_scores(part.index, part.position, score(logits_SV, part.targets, part.num_top))

    def step(
        self,
        batch: BatchTensors,
        rows: Sequence[Row],
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
        on_scores: OnScores | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> Sampled:
        logits_SV = self.forward(batch, on_layer, before_layer, hidden, on_scores, elsewhere)
        return sample(logits_SV, rows, self.constraints.allowed(rows))

    def attend(self, layer: int, asked: Sequence[HolderQueries], q: memoryview, parts: int = 1) -> memoryview:
        """Reads `memory` alone, and has no buffers in common with a step."""
        kv, shape = split_of(self.memory.layers[layer], self._shapes[layer], parts)
        with torch.inference_mode():
            return answer_to(
                asked, queries_of(q, shape, asked), kv, self.layout.block_size, shape, self.kernels
            )

    def relay(
        self,
        batch: BatchTensors,
        on_layer: OnLayer | None = None,
        before_layer: BeforeLayer | None = None,
        hidden: Hidden | None = None,
    ) -> Hidden:
        """`Hidden` of shape `[T, N]` in the activations' type."""
        assert self.layers[1] < self.spec.num_layers, "the last stage samples"
        with self._iteration(batch):
            x_TN = self._taken(batch, hidden)
            residual = self.model.run_layers(x_TN, Pass(batch, self.memory, on_layer, before_layer))
            x_TN = self.model.add(residual).cpu()
        return Hidden(tuple(x_TN.shape), _name(x_TN.dtype), bytes_of(x_TN))

    @contextmanager
    def _iteration(self, batch: BatchTensors) -> Iterator[None]:
        """Nothing of an iteration is left in the queue of a device afterwards, however it ends: its blocks may be
        given to another request then, whose KV comes on another stream."""
        try:
            with torch.inference_mode(), self._threads(batch):
                yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def _threads(self, batch: BatchTensors) -> AbstractContextManager[None]:
        if batch.only_decodes and not batch.assembled:
            return self._team.step(batch.num_rows)
        self._team.all()
        return nullcontext()

    def _taken(self, batch: BatchTensors, hidden: Hidden | None) -> Tensor:
        """What the first layer here takes, as a tensor that may be changed."""
        assert (hidden is None) == (self.layers[0] == 0), "the first stage takes no hidden states, others do"
        if hidden is None:
            return self.model.embed(batch.tokens_T)
        x_TN = torch.empty(batch.num_tokens, self.spec.hidden_size, dtype=self.model.activations)
        expected = tuple(x_TN.shape), _name(x_TN.dtype), x_TN.nbytes
        if (hidden.shape, hidden.dtype, hidden.data.nbytes) != expected:
            raise ProtocolError(
                f"hidden states of {hidden.data.nbytes} bytes ({hidden.dtype} {hidden.shape}) came for a batch "
                f"that needs {expected[2]} ({expected[1]} {expected[0]})"
            )
        np.copyto(np.frombuffer(bytes_of(x_TN), np.uint8), np.frombuffer(hidden.data, np.uint8))
        return x_TN.to(self.device)


def num_blocks_of(options: EngineOptions, layout: KVLayout) -> int:
    """How many blocks there is memory for beside the live states. Raises StartError."""
    live_bytes = layout.state_bytes * options.max_sequences
    num_blocks = (options.kv_bytes - live_bytes) // layout.block_bytes
    least = layout.least_blocks
    if num_blocks >= least:
        return num_blocks
    beside = ""
    if live_bytes:
        beside = f" beside the states of {options.max_sequences} sequences ({live_bytes} bytes)"
    raise StartError(
        f"engine.kv_memory {options.kv_bytes} bytes holds fewer than {least} blocks of {layout.block_bytes} bytes"
        f"{beside}; give at least {live_bytes + least * layout.block_bytes}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch finds no CUDA device here; use cpu")
    return torch.device(name)
