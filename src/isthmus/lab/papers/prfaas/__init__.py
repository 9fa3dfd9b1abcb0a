"""Prefill-as-a-Service: "KVCache of Next-Generation Models Could Go Cross-Datacenter" (arXiv 2604.15039v2)."""

from isthmus.lab.papers.prfaas import case, tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    case.throughput_table,
    case.implied_table,
    case.profile_table,
    tables.offloading_table,
    tables.splits_table,
    tables.thresholds_table,
    tables.sizing_table,
    tables.price_table,
    tables.inferred_inputs_table,
    tables.interpolation_table,
    tables.held_out_table,
    tables.bandwidth_table,
    tables.beyond_table,
    case.sizes_table,
)

__all__ = ["TABLES"]
