"""Prefill-as-a-Service: "KVCache of Next-Generation Models Could Go Cross-Datacenter" (arXiv 2604.15039v2)."""

from isthmus.lab.papers.prfaas import case, deployments, sensitivity
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    case.THROUGHPUT_TABLE,
    case.IMPLIED,
    case.PROFILE_TABLE,
    deployments.OFFLOADING_TABLE,
    deployments.SPLITS,
    deployments.THRESHOLDS,
    deployments.SIZING,
    deployments.PRICE,
    sensitivity.INFERRED_INPUTS,
    sensitivity.INTERPOLATION,
    sensitivity.HELD_OUT,
    sensitivity.BANDWIDTH,
    sensitivity.BEYOND,
    case.SIZES,
)

__all__ = ["TABLES"]
