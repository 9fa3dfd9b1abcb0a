"""How the cores of one machine are shared: which nodes it starts where nobody names any, and their threads.

Both are rules of the number of cores alone, so that they are known before a model is read and cost no start any time.
What was measured for them: docs/decisions/0013-one-node-on-few-cores.md.
"""

from __future__ import annotations

from isthmus.config import Config, RoleConfig, RolesConfig

SPLIT_CORES = 8
"""From so many cores on, prefill and decode get a node each. On fewer, half of the cores is what is missed most: a
mixed node has all of them for whatever there is to do, computes prompts in the same iterations as decodes, and hands
nothing over."""
SPARE_CORES = 4
"""From so many cores on, one is kept for gateway and sessions. They take a small part of one: of two or three cores,
keeping one loses more than sharing it."""


def shaped(config: Config, cores: int) -> tuple[Config, str]:
    """The configuration with the nodes that suit so many cores, and why, in a sentence; as it is and "" where it names
    nodes, or where these cores are not what they compute with."""
    engine = config.engine
    if config.placement != "local" or config.clusters or "roles" in config.model_fields_set:
        return config, ""
    if engine.kind == "emulated" or engine.device not in (None, "cpu"):
        return config, ""
    if cores >= SPLIT_CORES:
        return config, f"{cores} cores are enough for a node of each phase; --mixed 1 makes it one for both."
    why = (
        f"One mixed node has all the cores ({cores}): of two, each would have half and idle by turns; "
        "--prefill 1 --decode 1 starts two."
    )
    roles = RolesConfig(mixed=RoleConfig())
    return config.model_copy(update={"roles": roles}), why


def node_threads(cores: int, num_processes: int) -> int:
    """Of each of so many processes: the cores shared evenly, since a parallel kernel waits for its slowest thread and a
    core lent twice costs more than it gives."""
    shared = cores if cores < SPARE_CORES else cores - 1
    return max(1, shared // num_processes)
