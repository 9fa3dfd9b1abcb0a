"""Mooncake: "Trading More Storage for Less Computation" (FAST'25) and arXiv 2407.00079.

Numbers that the papers print only as curves were read off the vector figures, to about 1 % of the axis.
"""

from isthmus.lab.papers.mooncake import hit_rate, tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    tables.capacity_table,
    tables.prefill_time_table,
    tables.scheduling_table,
    tables.global_cache_table,
    tables.network_table,
    tables.request_cost_table,
    tables.ratio_table,
    hit_rate.figure_9_table,
    hit_rate.eviction_table,
    hit_rate.blog_table,
    hit_rate.by_policy_table,
    tables.rejections_table,
    tables.fluctuation_table,
)

__all__ = ["TABLES"]
