"""Infinite-LLM (arXiv 2401.02669): attention over KV on many instances.

Two versions have different headlines. The first (DistKV-LLM, January 2024) borrows with a ledger; the second (July
2024) plans moves with a performance model. Which one a figure is of stands with it.
"""

from __future__ import annotations

from isthmus.lab.papers.infinite_llm import tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (tables.context_table, tables.traffic_table, tables.gain_table, tables.moves_table)
