"""Small traces under the names of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.papers.lab import FILES
from isthmus.sim.workloads import generate


def write_traces(folder: Path, spec: str) -> None:
    """The same generated workload for every trace."""
    lines = [
        {
            "timestamp": request.arrival_ns // 1_000_000,
            "input_length": request.num_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
        }
        for request in generate(spec).requests
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in FILES.values():
        (folder / name).write_text(text)
