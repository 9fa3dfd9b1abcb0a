"""Which inputs were inferred from the figures that they are compared with, and which of our figures hang on them.

What is inferred is said once, in `INFERRED`. Which figures hang on it nobody says: a table is measured again with each
of those inputs twice as slow, and what moves is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from isthmus.core.cost.offload import PrefillFleet, RequestWork
from isthmus.lab.papers.lab import Lab
from isthmus.lab.papers.table import PaperCell


class Factors(msgspec.Struct, frozen=True):
    """On times: of a prefill on H200 and on H20, and of a decode step. 2: twice as slow."""

    h200: float = 1.0
    h20: float = 1.0
    decode: float = 1.0

    def __mul__(self, other: Factors) -> Factors:
        return Factors(self.h200 * other.h200, self.h20 * other.h20, self.decode * other.decode)

    def work(self, what: RequestWork) -> RequestWork:
        return RequestWork(
            remote_s=lambda length: self.h200 * what.remote_s(length),
            local_s=lambda length: self.h20 * what.local_s(length),
            kv_bytes=what.kv_bytes,
        )

    def fleet(self, fleet: PrefillFleet) -> PrefillFleet:
        return msgspec.structs.replace(fleet, decode_rate=fleet.decode_rate / self.decode)


AS_IS = Factors()
INFERRED = ("h20", "decode")
"""Those of Factors that come from Table 6, the result. Times on H200 are printed, in Table 5."""
# Enough to move whatever halving them moves: a minimum of rates follows what slows, not always what quickens.
_SLOWER = tuple(Factors(**{name: 2.0}) for name in INFERRED)


def marked(measure: Callable[[Factors], Iterable[PaperCell]]) -> Callable[[Lab], Iterator[PaperCell]]:
    """`measure` for a Table: each cell whose figure of ours is another when an inferred input is, is marked.

    `measure` must yield as many cells, in the same order, for any factors.
    """

    def cells(lab: Lab) -> Iterator[PaperCell]:
        slower = [measure(factors) for factors in _SLOWER]
        for cell, *others in zip(measure(AS_IS), *slower, strict=True):
            moves = any(other.ours != cell.ours for other in others)
            yield msgspec.structs.replace(cell, inferred=moves)

    return cells
