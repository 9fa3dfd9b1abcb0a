"""Pipeline groups as the head sees them: who is there, until a group is complete, and that it ends as a whole.

A complete group is told so; its leader then joins the stages, and the cluster as one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from isthmus.cluster.messages import Gathered, StageHello, Stop
from isthmus.messenger import Session
from isthmus.types import NodeId


@dataclass(eq=False)
class Stage:
    """One process of a group, with its session and the gauges of its last beat."""

    hello: StageHello
    connection: Session
    heard_ns: int
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> NodeId:
        return NodeId(f"{self.hello.group}.{self.hello.stage}")


class Groups:
    """For the head's event loop."""

    def __init__(self) -> None:
        self._groups: dict[NodeId, dict[int, Stage]] = {}

    def objection(self, hello: StageHello) -> str:
        """Why a stage cannot be let in; empty when it can."""
        stages = self._groups.get(hello.group, {})
        if not 0 <= hello.stage < hello.stages:
            return f"there is no stage {hello.stage} among {hello.stages}"
        if hello.stage in stages:
            return f"stage {hello.stage} of {hello.group} is here already"
        if any(stage.hello.stages != hello.stages for stage in stages.values()):
            return f"{hello.group} has another number of stages"
        return ""

    def enter(self, stage: Stage) -> None:
        """The last one to come completes its group."""
        group = self._groups.setdefault(stage.hello.group, {})
        group[stage.hello.stage] = stage
        if len(group) == stage.hello.stages:
            addresses = tuple([group[number].hello.address for number in range(1, stage.hello.stages)])
            group[0].connection.send(Gathered(addresses))

    def leave(self, stage: Stage) -> None:
        """The others cannot go on without it: they leave as well, and may come back as a new group."""
        group = self._groups.get(stage.hello.group, {})
        if group.get(stage.hello.stage) is not stage:
            return
        del self._groups[stage.hello.group]
        for other in group.values():
            if other is not stage:
                other.connection.send(Stop())

    def sessions(self, group: NodeId) -> list[Session]:
        """Those with the stages that follow its leader; none for a node that is no group."""
        stages = sorted(self._groups.get(group, {}).items())
        return [stage.connection for number, stage in stages if number]

    def followers(self) -> Iterator[Stage]:
        """All stages but the leaders, whom the head knows as nodes."""
        for group in self._groups.values():
            yield from [stage for number, stage in sorted(group.items()) if number]
