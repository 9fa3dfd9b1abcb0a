"""SARATHI (arXiv 2308.16369) and Sarathi-Serve (OSDI'24): chunked prefills, decode-maximal and stall-free batches."""

from __future__ import annotations

from isthmus.lab.papers.sarathi import tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    tables.iterations_table,
    tables.chunks_table,
    tables.throughput_table,
    tables.balance_table,
    tables.ablation_table,
    tables.bubbles_table,
)
