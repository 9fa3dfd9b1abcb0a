"""KV of other prompts, moved and mended: which tokens are computed anyway, what is kept, which prompts are alike."""

from isthmus.core.reuse.passages import MIN_PASSAGE, SIMILAR, cut, extended, passages, similarity
from isthmus.core.reuse.selection import (
    CACHEBLEND,
    EPIC,
    SELECTIONS,
    SEMANTIC,
    Packing,
    Selection,
    pack,
    rows_per_layer,
)

__all__ = [
    "CACHEBLEND",
    "EPIC",
    "MIN_PASSAGE",
    "SELECTIONS",
    "SEMANTIC",
    "SIMILAR",
    "Packing",
    "Selection",
    "cut",
    "extended",
    "pack",
    "passages",
    "rows_per_layer",
    "similarity",
]
