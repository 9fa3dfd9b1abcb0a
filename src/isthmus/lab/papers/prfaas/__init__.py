"""Prefill-as-a-Service: "KVCache of Next-Generation Models Could Go Cross-Datacenter" (arXiv 2604.15039v2)."""

from isthmus.lab.papers.prfaas import deployments, kv, sensitivity, sizing
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    kv.THROUGHPUT_TABLE,
    kv.IMPLIED,
    kv.PROFILE_TABLE,
    deployments.TABLE,
    deployments.SPLITS,
    deployments.THRESHOLDS,
    sizing.SIZING,
    sizing.PRICE,
    sensitivity.INFERRED_INPUTS,
    sensitivity.INTERPOLATION,
    sensitivity.HELD_OUT,
    sensitivity.BANDWIDTH,
    sensitivity.BEYOND,
    kv.SIZES,
)

__all__ = ["TABLES"]
