"""`isthmus bench engine`: prefill and decode speed of the engine on a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from typer import Option

from isthmus.bench.options import ComputeThreads, Rounds
from isthmus.bench.study import Outcome, Report, in_turns, medians, over, said, silent, table, timed
from isthmus.core.types import Sampling
from isthmus.live.engine.batch import Chunk
from isthmus.live.engine.engine import Engine, EngineOptions
from isthmus.live.engine.sampling import Row, sample

CHUNK_TOKENS = 512
_GREEDY = Row(Sampling(temperature=0.0), ())


@dataclass(frozen=True)
class Case:
    """Prefill (`steps == 0`: one prompt, tokens/s of the prompt) or decode after the given context lengths."""

    name: str
    contexts: tuple[int, ...]
    steps: int = 0


@dataclass(frozen=True)
class Plan:
    model: Annotated[Path, Option(help="Model folder or GGUF file.")]
    dtype: Annotated[str | None, Option(help="float32 or bfloat16; default: the model's.")] = None
    threads: ComputeThreads = None
    rounds: Rounds = 3


class Side(Protocol):
    """An engine that runs a model."""

    def prefill(self, prompts: list[list[int]]) -> Any:
        """Computes prompts; returns what `decode` needs to go on."""

    def decode(self, prompts: list[list[int]], state: Any, steps: int) -> None:
        """Generates `steps` tokens for each prompt; may be called again with the same state."""


def cases(max_length: int, steps: int = 32) -> list[Case]:
    """Prefill of 512 and 4,096 tokens; decode at 1 to 32 rows of 128 tokens, and 32 rows of 16 to 1,024."""
    found = [Case(f"prefill {n}", (n,)) for n in (512, 4096) if n <= max_length]
    found += [Case(f"decode batch {n}", (128,) * n, steps) for n in (1, 8, 16, 32)]
    mixed = tuple(16 + round(i * 1008 / 31) for i in range(32))
    return [*found, Case("decode batch 32 mixed", mixed, steps)]


class Ours:
    def __init__(self, folder: Path, dtype: str | None, threads: int | None) -> None:
        self._engine = Engine(folder, EngineOptions(dtype=dtype, threads=threads, kv_bytes=1 << 30))

        self.dtype, self.vocab_size = self._engine.spec.dtype, self._engine.spec.vocab_size
        self.max_length = self._engine.max_length

    @property
    def name(self) -> str:
        return f"{self._engine.kernels.name} kernels, {self._engine.layout.dtype} weights and KV"

    def prefill(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Computes prompts in chunks; returns each one's blocks and next token."""
        size, tables, tokens, first = self._engine.layout.block_size, [], [], 0
        for prompt in prompts:
            count = -(-(len(prompt) + 256) // size)
            tables.append(list(range(first, first + count)))
            first += count
            for start in range(0, len(prompt), CHUNK_TOKENS):
                part = prompt[start : start + CHUNK_TOKENS]
                chunk = Chunk(part, start, tables[-1], start + len(part) == len(prompt))
                logits = self._engine.forward(self._engine.build([chunk]))
            tokens += sample(logits, [_GREEDY])[0]
        return tables, tokens

    def decode(self, prompts: list[list[int]], state: Any, steps: int) -> None:
        tables, tokens = state
        rows = [_GREEDY] * len(prompts)
        batch = self._engine.build(
            [Chunk([t], len(p), b, True) for t, p, b in zip(tokens, prompts, tables, strict=True)]
        )
        for step in range(steps):
            next_tokens, _ = sample(self._engine.forward(batch), rows)
            if step + 1 < steps:
                batch.advance(next_tokens)


Others = Callable[[str], Mapping[str, Side]]
"""Other sides, for a dtype."""


def run(plan: Plan, report: Report = silent, others_of: Others = lambda dtype: {}) -> Outcome:
    """Prefill and decode speed of the engine on this machine: tokens/s.

    All cases, all sides in turns. A row has `case`, and tokens per second by side.
    """
    ours = Ours(plan.model, plan.dtype, plan.threads)
    others = others_of(plan.dtype or ours.dtype)
    report(f"{ours.name}; {torch.get_num_threads()} threads")
    sides, rows = {"isthmus": ours, **others}, []
    for case in cases(ours.max_length):
        rows.append({"case": case.name} | _speeds(case, sides, ours.vocab_size, plan.rounds))
        report(said(rows[-1], "tokens/s"))
    columns = {"case": "case"} | {side: side for side in sides} | over("isthmus", others)
    return Outcome([table("isthmus bench engine: tokens/s", columns, rows)], rows)


def _speeds(case: Case, sides: Mapping[str, Side], vocab_size: int, rounds: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(len(case.contexts))
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in case.contexts]
    states = {name: side.prefill(prompts) if case.steps else None for name, side in sides.items()}
    measures = {name: partial(_speed, side, case, prompts, states[name]) for name, side in sides.items()}
    return medians(in_turns(measures, rounds))


def _speed(side: Side, case: Case, prompts: list[list[int]], state: Any) -> float:
    """Tokens per second of one turn of a case; `state` is what prefill returned, for decode cases."""
    if case.steps:
        return len(prompts) * case.steps / timed(lambda: side.decode(prompts, state, case.steps))
    return sum(case.contexts) / timed(lambda: side.prefill(prompts))
