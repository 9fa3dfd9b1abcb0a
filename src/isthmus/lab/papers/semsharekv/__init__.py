"""SemShareKV (arXiv 2509.24832) and its neighbours: prompts assembled from other prompts' KV, by cost model."""

from __future__ import annotations

from isthmus.lab.papers.semsharekv import memory, neighbours, quality, steps, ttft
from isthmus.lab.papers.table import Table

TABLES: tuple[Table, ...] = (ttft.TABLE, steps.TABLE, memory.TABLE, neighbours.TABLE, quality.TABLE)
