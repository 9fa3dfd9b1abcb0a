"""Cost from first principles: model and hardware facts, an engine's coefficients (docs/cost-model.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from isthmus.core.cost.elsewhere import Queries
from isthmus.core.cost.facts import ModelFacts
from isthmus.core.cost.hardware import Coefficients, Hardware
from isthmus.core.cost.transfer import UNKNOWN, Handling
from isthmus.core.errors import ConfigError

# Bytes of one weight, with the scales of its block.
WEIGHT_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
    "int4": 0.53,
}
KV_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
_PS = 1e12
_RESERVED_BYTES = 3_000_000_000  # activations, graphs and the communicator of one GPU
_MEMORY_SHARE = 0.90  # of a GPU's memory that engines let themselves use


class Analytic(msgspec.Struct, frozen=True, tag=True):
    """One instance: a model on `num_gpus` accelerators of one tensor-parallel group.

    `weight_dtype`: a key of WEIGHT_BYTES; `kv_dtype`: a key of KV_BYTES. Raises ConfigError when they are not.
    """

    model: ModelFacts
    hardware: Hardware
    coefficients: Coefficients
    num_gpus: int = 1
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    handling: ClassVar[Handling] = UNKNOWN

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"num_gpus is {self.num_gpus}; an instance needs at least 1")
        for field, known in (("weight_dtype", WEIGHT_BYTES), ("kv_dtype", KV_BYTES)):
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} {getattr(self, field)!r} is not known; known: {', '.join(known)}")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes one token adds to the KV cache, all layers, whole model."""
        return self.model.kv_elements * KV_BYTES[self.kv_dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence that do not grow with it: recurrent states and short windows."""
        return self.model.state_bytes + self.model.window_elements * KV_BYTES[self.kv_dtype]

    @property
    def weight_bytes(self) -> float:
        """All matrices at `weight_dtype`, the vocabulary twice in bf16 (embedding and lm_head)."""
        model, head = self.model, self.model.vocab_size * self.model.hidden_size
        return (model.num_params - head) * WEIGHT_BYTES[self.weight_dtype] + 2 * self.head_bytes

    @property
    def head_bytes(self) -> int:
        """The lm_head, which engines keep in bf16."""
        return self.model.vocab_size * self.model.hidden_size * (4 if self.weight_dtype == "fp32" else 2)

    @property
    def matmul_flops(self) -> float:
        """Dense peak at the weights' precision. Formats the hardware cannot multiply are widened to bf16."""
        native = {"fp8": self.hardware.fp8_flops, "nvfp4": self.hardware.fp4_flops}
        return native.get(self.weight_dtype, 0.0) or self.hardware.bf16_flops

    @property
    def free_bytes(self) -> float:
        """Memory left for KV by the weights and the engine's own buffers; negative when they do not fit."""
        return self._usable_bytes - self.weight_bytes - _RESERVED_BYTES * self.num_gpus

    @property
    def fits(self) -> bool:
        """Whether the weights leave memory for KV."""
        return self.free_bytes > 0

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that fit beside the weights. Raises ConfigError when none does."""
        return self._tokens_in(
            self.free_bytes, f"{self.weight_bytes / 1e9:.1f} GB of {self.weight_dtype} weights"
        )

    def _tokens_in(self, num_bytes: float, what: str) -> int:
        # On more GPUs than there are parts to cut it into, the KV of a token is held more than once.
        replicas = max(1.0, self.num_gpus / self.model.kv_shards)
        tokens = int(num_bytes / (max(self.kv_token_bytes, 1) * replicas))
        if tokens < 1:
            raise ConfigError(
                f"{self.model.architecture} with {what} does not fit {self.num_gpus} x {self.hardware.name} "
                f"({self._usable_bytes / 1e9:.1f} GB usable); give it more GPUs"
            )
        return tokens

    @property
    def lent_capacity_tokens(self) -> int:
        """Tokens of KV on as many accelerators that have no weights, and attend for others. Raises ConfigError when
        none fits."""
        room = self._usable_bytes - _RESERVED_BYTES * self.num_gpus
        return self._tokens_in(room, "KV")

    @property
    def _usable_bytes(self) -> float:
        return _MEMORY_SHARE * self.hardware.memory_bytes * self.num_gpus


class AnalyticCost:
    """An `Analytic` with its derived coefficients, in picoseconds. Immutable but for a memo of batch sizes."""

    __slots__ = (
        "_attention", "_context", "_cover", "_decode_token", "_expert_flop", "_expert_read", "_fixed", "_head",
        "_kv_read", "_memo", "_moe", "_prefill_token", "_sequence", "_state", "_weight_flop", "_weight_read",
        "handling", "kv_token_bytes", "num_layers", "queries", "state_bytes",
    )  # fmt: skip

    def __init__(self, cost: Analytic) -> None:
        model, gpu, by, gpus = cost.model, cost.hardware, cost.coefficients, cost.num_gpus
        self.kv_token_bytes: int = cost.kv_token_bytes
        self.state_bytes: int = cost.state_bytes
        self.num_layers: int = model.num_layers
        self.handling: Handling = cost.handling
        self.queries = Queries(model.query_elements, model.query_heads, model.kv_layers)

        weight, flops = WEIGHT_BYTES[cost.weight_dtype], cost.matmul_flops
        read, matmul = gpus * by.weight_read * gpu.memory_bw, gpus * by.matmul * flops
        self._weight_read = _PS * model.dense_params * weight / read
        self._weight_flop = _PS * 2 * model.dense_params / matmul
        self._head = _PS * cost.head_bytes / read

        experts = model.moe_layers * model.expert_params
        self._moe = model.moe_layers > 0
        self._cover = 1 - model.experts_per_token / model.num_experts if self._moe else 0.0
        self._expert_read = _PS * experts * model.num_experts * weight / (gpus * by.expert_read * gpu.memory_bw)
        self._expert_flop = _PS * 2 * experts * model.experts_per_token / (gpus * by.expert_matmul * flops)

        attention = gpus * by.attention * gpu.bf16_flops
        self._attention = _PS * model.attention_flops / attention
        kv_read = min(gpus, model.kv_shards) * by.kv_read * gpu.memory_bw
        self._kv_read = _PS * cost.kv_token_bytes / kv_read
        self._context = math.ceil(self._kv_read)

        # A recurrent state is read and written; a window is read.
        state = 2 * model.state_bytes + model.window_elements * KV_BYTES[cost.kv_dtype]
        self._state = _PS * state / kv_read
        self._sequence = _PS * by.sequence_s
        self._fixed = _PS * (model.num_layers * by.layer_s + model.moe_layers * by.moe_layer_s + by.step_s)
        self._fixed += self._head
        self._decode_token = self._prefill_token = 0.0
        if gpus > 1:
            self._fixed += _PS * 2 * model.num_layers * by.allreduce_s * math.log2(gpus)
            message = 2 * model.num_layers * model.hidden_size * 2 / (by.link * gpu.link_bw)
            ring = 2 * (gpus - 1) / gpus
            self._prefill_token = _PS * message * ring
            self._decode_token = _PS * message * ((1 - by.one_shot) * ring + by.one_shot * (gpus - 1))
        self._prefill_token += _PS * model.token_flops / attention
        self._memo: dict[int, int] = {}

    def _gemm(self, num_tokens: float) -> float:
        """Weights read once, against the arithmetic of so many tokens: a smooth maximum (fourth powers)."""
        flop, read = self._weight_flop * num_tokens, self._weight_read
        flop *= flop
        read *= read
        total = math.sqrt(math.sqrt(flop * flop + read * read))
        if self._moe:
            # Experts touched by at least one token, uniform routing.
            read = self._expert_read * (1 - self._cover**num_tokens)
            flop = self._expert_flop * num_tokens
            flop *= flop
            read *= read
            total += math.sqrt(math.sqrt(flop * flop + read * read))
        return total

    def decode_ps(self, num_decodes: float, context: float) -> float:
        """`decode_step_ps` before rounding; both may be means."""
        per = self._sequence + self._state + self._decode_token
        return self._gemm(num_decodes) + num_decodes * per + self._fixed + self._kv_read * context

    def prompt_work_ps(self, num_tokens: float) -> float:
        """What a prompt adds to iterations that run anyway: no weights read, no overhead of an iteration."""
        flop = self._weight_flop + self._expert_flop if self._moe else self._weight_flop
        return num_tokens * (flop + self._prefill_token + 0.5 * self._attention * num_tokens)

    def prefill_ns(self, num_tokens: int, cached: int) -> int:
        """One prompt alone, in one go: `num_tokens` after `cached` ones."""
        if not num_tokens:
            return 0
        pairs = self._attention * num_tokens * (cached + 0.5 * num_tokens)
        read = self._kv_read * (cached + num_tokens)
        work = self._gemm(num_tokens) + num_tokens * self._prefill_token + self._fixed + self._sequence
        return math.ceil(work + (pairs if pairs > read else read)) // 1000

    def decode_step_ps(self, num_decodes: int) -> tuple[int, int]:
        """(fixed, per token of context): with contexts that sum to C an iteration takes fixed + per * C."""
        fixed = self._memo.get(num_decodes)
        if fixed is None:
            fixed = self._memo[num_decodes] = math.ceil(self.decode_ps(num_decodes, 0)) if num_decodes else 0
        return fixed, self._context

    def step_ps(self, chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
        """One iteration: prefill chunks `(num_tokens, cached)` and decodes whose contexts sum to `context`."""
        if not chunks:
            return self.decode_step_ps(num_decodes)[0] + self._context * context
        num_tokens, attention = 0, 0.0
        for count, cached in chunks:
            num_tokens += count
            pairs = self._attention * count * (cached + 0.5 * count)
            read = self._kv_read * (cached + count)
            attention += pairs if pairs > read else read
        work = self._gemm(num_tokens + num_decodes) + num_tokens * self._prefill_token + attention + self._fixed
        work += self._sequence * len(chunks) + num_decodes * (self._sequence + self._state + self._decode_token)
        return math.ceil(work) + self._context * context

    def attend_ps(self, num_queries: int, num_tokens: float) -> float:
        """Every KV is read once, and meets every query."""
        return max(self._attention * num_queries, self._kv_read) * num_tokens
