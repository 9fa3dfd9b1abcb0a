"""SemShareKV (arXiv 2509.24832) and its neighbours: prompts assembled from other prompts' KV, by cost model."""

from __future__ import annotations

from isthmus.lab.papers.semsharekv import tables
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (tables.TTFT, tables.STEPS, tables.MEMORY, tables.NEIGHBOURS, tables.QUALITY)
