"""Lamina (arXiv 2405.01814v2): decode attention and KV on devices of their own.

The first version (attention offloading, May 2024) has other hardware and other headlines, 1.48 to 12.1 times the
throughput per dollar; its prices and configurations are not known here, so none of that is reproduced.
"""

from __future__ import annotations

from isthmus.lab.papers.lamina import setup, tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (
    setup.TABLE,
    tables.BATCH,
    tables.THROUGHPUT,
    tables.SATURATION,
    tables.NETWORK,
)
