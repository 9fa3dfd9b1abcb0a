"""SARATHI (arXiv 2308.16369) and Sarathi-Serve (OSDI'24): chunked prefills, decode-maximal and stall-free batches."""

from __future__ import annotations

from isthmus.lab.papers.sarathi import ablation, balance, bubbles, chunks, iterations, throughput
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    iterations.TABLE,
    chunks.TABLE,
    throughput.TABLE,
    balance.TABLE,
    ablation.TABLE,
    bubbles.TABLE,
)
