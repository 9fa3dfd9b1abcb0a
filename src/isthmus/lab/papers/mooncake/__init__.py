"""Mooncake: "Trading More Storage for Less Computation" (FAST'25) and arXiv 2407.00079.

Numbers that the papers print only as curves were read off the vector figures, to about 1 % of the axis.
"""

from isthmus.lab.papers.mooncake import hit_rate, tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    tables.CAPACITY,
    tables.PREFILL_TIME,
    tables.SCHEDULING,
    tables.GLOBAL_CACHE,
    tables.NETWORK,
    tables.REQUEST_COST,
    tables.RATIO,
    hit_rate.FIGURE_9,
    hit_rate.TABLE_1,
    hit_rate.BLOG,
    hit_rate.BY_POLICY,
    tables.REJECTIONS,
    tables.FLUCTUATION,
)

__all__ = ["TABLES"]
