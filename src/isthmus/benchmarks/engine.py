"""`isthmus bench engine`: this engine and transformers on the same model, in turns, in one process.

transformers runs its own fast path: SDPA attention, a dynamic cache, logits of the last position only, and a
bare decode loop (without `generate`, whose checks would count against it). Both sides choose greedily.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from isthmus.engine.batch import Chunk
from isthmus.engine.engine import Engine, EngineOptions
from isthmus.engine.sampling import Row, sample
from isthmus.types import Sampling

CHUNK_TOKENS = 512
_GREEDY = Row(Sampling(temperature=0.0), ())


@dataclass(frozen=True)
class Case:
    """Prefill (`steps == 0`: one prompt, tokens/s of the prompt) or decode after the given context lengths."""

    name: str
    contexts: tuple[int, ...]
    steps: int = 0


@dataclass(frozen=True)
class Result:
    """Median tokens per second of each side; `ratio` is ours over theirs."""

    case: str
    isthmus_tokens_per_s: float
    transformers_tokens_per_s: float | None
    ratio: float | None


def cases(max_length: int, steps: int = 32) -> list[Case]:
    """Prefill of 512 and 4,096 tokens; decode at 1 to 32 rows of 128 tokens, and 32 rows of 16 to 1,024."""
    found = [Case(f"prefill {n}", (n,)) for n in (512, 4096) if n <= max_length]
    found += [Case(f"decode batch {n}", (128,) * n, steps) for n in (1, 8, 16, 32)]
    mixed = tuple(16 + round(i * 1008 / 31) for i in range(32))
    return [*found, Case("decode batch 32 mixed", mixed, steps)]


class _Ours:
    def __init__(self, folder: Path, dtype: str | None, threads: int | None) -> None:
        self._engine = Engine(folder, EngineOptions(dtype=dtype, threads=threads, kv_bytes=1 << 30))

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


class _Theirs:
    name = "transformers"

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> Any:
        """One left-padded batch, as `generate` does it."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        padded = None if bool(mask.all()) else mask
        out = self._model(ids, attention_mask=padded, position_ids=positions, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1].argmax(-1), mask, padded is not None

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], state: Any, steps: int) -> None:
        cache, tokens, mask, padded = state
        if (extra := cache.get_seq_length() - mask.shape[1]) > 0:
            cache.crop(-extra)  # back to the prompts, for another turn
        positions = torch.tensor([[len(p)] for p in prompts])
        for _ in range(steps):
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
            out = self._model(
                tokens[:, None],
                attention_mask=mask if padded else None,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            tokens, positions = out.logits[:, -1].argmax(-1), positions + 1


def run(
    folder: Path,
    *,
    against_transformers: bool,
    dtype: str | None = None,
    threads: int | None = None,
    rounds: int = 3,
    report: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """All cases, each side in turns, `rounds` times after one warm-up; medians."""
    ours = _Ours(folder, dtype, threads)
    sides: list[Any] = [ours]
    if against_transformers:
        sides.append(_Theirs(folder, dtype or ours._engine.spec.dtype))
    report(f"{ours.name}; {torch.get_num_threads()} threads")
    vocab_size = ours._engine.spec.vocab_size
    results = []
    for case in cases(ours._engine.max_length):
        generator = torch.Generator().manual_seed(len(case.contexts))
        prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in case.contexts]
        states = [side.prefill(prompts) if case.steps else None for side in sides]
        speeds: list[list[float]] = [[] for _ in sides]
        for turn in range(rounds + 1):
            for side, state, found in zip(sides, states, speeds, strict=True):
                speed = _measure(side, case, prompts, state)
                if turn:  # the first is the warm-up
                    found.append(speed)
        medians = [statistics.median(found) for found in speeds]
        theirs = medians[1] if len(medians) > 1 else None
        results.append(Result(case.name, medians[0], theirs, medians[0] / theirs if theirs else None))
        report(f"{case.name}: {medians[0]:,.0f} tokens/s")
    return results


def _measure(side: Any, case: Case, prompts: list[list[int]], state: Any) -> float:
    """Tokens per second of one turn of a case; `state` is what prefill returned, for decode cases."""
    started = time.perf_counter()
    if case.steps:
        side.decode(prompts, state, case.steps)
        return len(prompts) * case.steps / (time.perf_counter() - started)
    side.prefill(prompts)
    return sum(case.contexts) / (time.perf_counter() - started)


def table(results: list[Result]) -> Table:
    found = Table("case", "isthmus tokens/s", "transformers tokens/s", "ratio")
    for result in results:
        theirs = "" if result.transformers_tokens_per_s is None else f"{result.transformers_tokens_per_s:,.0f}"
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        found.add_row(result.case, f"{result.isthmus_tokens_per_s:,.0f}", theirs, ratio)
    return found


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]
