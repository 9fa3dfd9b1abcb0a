"""Prefill-as-a-Service: "KVCache of Next-Generation Models Could Go Cross-Datacenter" (arXiv 2604.15039v2)."""

from isthmus.lab.papers.prfaas import case, deployments, sensitivity
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    case.throughput_table,
    case.implied_table,
    case.profile_table,
    deployments.offloading_table,
    deployments.splits_table,
    deployments.thresholds_table,
    deployments.sizing_table,
    deployments.price_table,
    sensitivity.inferred_inputs_table,
    sensitivity.interpolation_table,
    sensitivity.held_out_table,
    sensitivity.bandwidth_table,
    sensitivity.beyond_table,
    case.sizes_table,
)

__all__ = ["TABLES"]
