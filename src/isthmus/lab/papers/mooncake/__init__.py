"""Mooncake: "Trading More Storage for Less Computation" (FAST'25) and arXiv 2407.00079.

Numbers that the papers print only as curves were read off the vector figures, to about 1 % of the axis.
"""

from isthmus.lab.papers.mooncake import (
    capacity,
    global_cache,
    hit_rate,
    network,
    prefill_time,
    ratio,
    rejections,
    request_cost,
    scheduling,
)
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    capacity.TABLE,
    prefill_time.TABLE,
    scheduling.TABLE,
    global_cache.TABLE,
    network.TABLE,
    request_cost.TABLE,
    ratio.TABLE,
    hit_rate.FIGURE_9,
    hit_rate.TABLE_1,
    hit_rate.BLOG,
    hit_rate.BY_POLICY,
    rejections.TABLE,
    rejections.FLUCTUATION,
)

__all__ = ["TABLES"]
