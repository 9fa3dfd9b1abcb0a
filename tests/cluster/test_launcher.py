"""Which processes a launcher starts."""

from __future__ import annotations

from isthmus.cluster.hosts import planned_processes
from isthmus.config import Config


def test_a_pipeline_group_is_a_process_for_each_stage() -> None:
    config = Config.model_validate({"roles": {"prefill": {"count": 2, "pipeline": 2}}})
    found = [(process.name, process.place.node, process.stage) for process in planned_processes(config)]
    assert found == [
        ("prefill-0", "prefill-0", 0),
        ("prefill-0.1", "prefill-0", 1),
        ("decode-0", "decode-0", 0),
    ]
