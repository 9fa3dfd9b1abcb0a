"""A later stage of a pipeline group in virtual time: it computes at once what comes down."""

from __future__ import annotations

from typing import Any

from isthmus.live.cluster.stage import StageNode, StageStepper
from isthmus.live.peers import messages
from tests.virtual.mover import LazyMover


class InlineStepper(StageStepper):
    def start(self) -> None:
        """There is no thread."""

    def stop(self) -> None:
        """Nor here."""

    def receive(self, message: messages.Downward, data: memoryview | None = None) -> None:
        super().receive(message, data)
        if isinstance(message, messages.StageRun):
            assert isinstance(self._mover, LazyMover)
            for piece in message.pieces:
                self._mover.load_now(piece.request)
        while (entry := None if self._queue.empty() else self._queue.get()) is not None:
            message, data, ahead = entry
            self._perform(message, data, ahead=ahead)
            self._waiting.popleft()


class VirtualStage(StageNode):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.stepper = InlineStepper(self._engine, self._options.stage, self.mover, self, self._later)
        self.runs = self.stepper.runs
