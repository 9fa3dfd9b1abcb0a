"""GPU memory of a prompt's KV, of which deeper layers keep less (SemShareKV, evaluation)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from isthmus.core.reuse import SEMANTIC, pack
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.semsharekv.setup import HIDDEN, MODEL, UNPUBLISHED, kv_bytes, node
from isthmus.lab.papers.table import Cell, Table

LENGTH, BLOCK = 5_000, 16
PUBLISHED = 42.0
_SET = "the schedule's `fade` is set by the published 42 %"


def packed_bytes(num_tokens: int, block_size: int) -> int:
    """Of the blocks that the prompt's KV takes then."""
    packing = pack(SEMANTIC, num_tokens, node().num_layers, block_size)
    num_dropped = packing.num_dropped if packing else 0
    return kv_bytes((-(-num_tokens // block_size) - num_dropped) * block_size)


def less(num_tokens: int, block_size: int) -> float:
    """Percent, against the same prompt's KV without blocks."""
    return 100 * (1 - packed_bytes(num_tokens, block_size) / kv_bytes(num_tokens))


def _measure(lab: Lab) -> Iterator[Cell]:
    layers = node().num_layers
    row = f"{LENGTH:,} tokens"
    yield Cell("a token", "KV (bytes)", None, node().kv_token_bytes, UNPUBLISHED)
    yield Cell(row, "full (MB)", None, kv_bytes(LENGTH) / 1e6, UNPUBLISHED)
    kept = fmean([SEMANTIC.kept(layer, layers) for layer in range(layers)])
    yield Cell(row, "kept, mean of the layers (%)", None, 100 * kept, _SET, inferred=True)
    yield Cell(row, "packed (MB)", None, packed_bytes(LENGTH, BLOCK) / 1e6, UNPUBLISHED, inferred=True)
    yield Cell(row, "less (%)", PUBLISHED, less(LENGTH, BLOCK), inferred=True)
    for block_size in (1, 64, 256):
        yield Cell(
            f"{row}, blocks of {block_size}", "less (%)", None, less(LENGTH, block_size), _SET, inferred=True
        )
    for length in (500, 1_000, 10_000):
        yield Cell(f"{length:,} tokens", "less (%)", None, less(length, BLOCK), _SET, inferred=True)
    # Nothing is dropped before the last layer has said what the question attends to.
    yield Cell(
        row, "while it is assembled, with the donor's (MB)", None, 2 * kv_bytes(LENGTH) / 1e6, UNPUBLISHED
    )
    yield Cell(row, "embeddings, host memory (MB)", None, LENGTH * HIDDEN * 2 / 1e6, UNPUBLISHED)


TABLE = Table(
    name="semsharekv-memory",
    title="GPU memory of a prompt's KV",
    source="SemShareKV (arXiv 2509.24832), evaluation, from notes",
    setup=(
        f"{MODEL}, 16 bits, by counting blocks of {BLOCK} tokens. Layer i keeps 0.8 * exp(-0.7 i / 31) of the prompt; "
        "0.7 was set so that 0.58 is kept in the mean, which is the published figure: it says that the mechanism "
        "frees what it promises to, rounding and tail included, and no more. The saving begins when the prompt is "
        "done: while it is assembled, its own KV and, on the GPU, the donor's are there."
    ),
    measure=_measure,
)
