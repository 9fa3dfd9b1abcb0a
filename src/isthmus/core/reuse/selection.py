"""Which tokens of an assembled prompt are computed in which layer, and which of its KV is kept.

One mechanism, three selectors (../docs/reuse.md): SemShareKV (arXiv 2509.24832), CacheBlend (arXiv 2405.16444) and
EPIC (arXiv 2410.15332). All are a `Selection`: numbers, and no code of their own.

Layers are counted among those that keep KV, from 0. A *candidate* is a token with KV of a donor; all others, and the
prompt's last `TAIL` tokens, are computed in every layer.
"""

from __future__ import annotations

import math

import msgspec

TAIL = 32
"""The prompt's last tokens: the question, whose attention says what matters. Always computed, never dropped."""


class Selection(msgspec.Struct, frozen=True):
    """`full_layers`: so many layers are computed for all tokens, and the keys and values of the one behind them, where
    candidates are chosen by how far their donors' are off; 0: none is chosen. In layer i of those behind, the share
    `recompute * decay ** (i - full_layers)` of the candidates, at least `floor`, is computed; of these the share `hot`
    by what the tail attends to, the others by deviation. `first`: of each passage so many tokens are computed in any
    case. In layer i of n the share `keep * exp(-fade * i / (n - 1))` of the prompt is kept for the answer.
    `alike`: tokens outside of passages have KV of the first donor's tokens that are most like them, unless the cosine
    of the two is below `least`, or, if `same`, they are other words."""

    name: str
    full_layers: int = 1
    recompute: float = 0.0
    decay: float = 1.0
    floor: float = 0.0
    hot: float = 0.0
    first: int = 0
    keep: float = 1.0
    fade: float = 0.0
    alike: bool = False
    least: float = 0.6
    same: bool = True

    def computed(self, layer: int) -> float:
        """The share of the candidates that goes through attention and MLP of this layer. Never grows with it."""
        if layer < self.full_layers:
            return 1.0
        return max(min(self.recompute, 1.0) * self.decay ** (layer - self.full_layers), self.floor)

    def kept(self, layer: int, num_layers: int) -> float:
        """The share of the prompt whose KV stays in this layer. Never grows with it."""
        return min(1.0, self.keep * math.exp(-self.fade * layer / max(1, num_layers - 1)))

    @property
    def drops(self) -> bool:
        return self.keep < 1.0 or self.fade > 0.0


SEMANTIC = Selection("semantic", recompute=0.4, decay=0.85, floor=0.02, hot=0.5, keep=0.8, fade=0.7, alike=True)
CACHEBLEND = Selection("cacheblend", recompute=0.15, decay=1.0)
EPIC = Selection("epic", full_layers=0, first=16)
SELECTIONS = {each.name: each for each in (SEMANTIC, CACHEBLEND, EPIC)}


class Packing(msgspec.Struct, frozen=True):
    """What is kept of a prompt's first `num_blocks` blocks: `kept[i]` blocks of layer i. They lie in `num_packed`
    blocks of the engine, layer by layer, one slice after the other; the blocks behind follow as ever."""

    num_blocks: int
    kept: tuple[int, ...]

    @property
    def num_packed(self) -> int:
        return -(-sum(self.kept) // len(self.kept))

    @property
    def num_dropped(self) -> int:
        """Blocks that are free again."""
        return self.num_blocks - self.num_packed


def pack(selection: Selection, num_tokens: int, num_layers: int, block_size: int) -> Packing | None:
    """Of a prompt of so many tokens; None where nothing is dropped."""
    num_blocks = (num_tokens - TAIL) // block_size
    if not selection.drops or num_blocks < 1:
        return None
    shares = [selection.kept(layer, num_layers) for layer in range(num_layers)]
    packing = Packing(num_blocks, tuple([max(1, math.ceil(num_blocks * share)) for share in shares]))
    return packing if packing.num_dropped else None


def rows_per_layer(
    selection: Selection, num_candidates: int, num_others: int, num_layers: int
) -> tuple[int, ...]:
    """Tokens computed in each layer of a prompt with so many candidates and so many others."""
    shares = [selection.computed(layer) for layer in range(num_layers)]
    return tuple([num_others + math.ceil(num_candidates * share) for share in shares])
