"""The sending half alone: whatever becomes of frames, its counts are of what is there."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.live.messenger import Priority, outbox
from isthmus.live.messenger.frames import Pieces
from isthmus.live.messenger.outbox import Frame, Outbox, Sending


@pytest.fixture(autouse=True, scope="module")
def _small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "SLICE", 16)
        patch.setattr(outbox, "HEADERS_PER_SLICE", 0)
        yield


class Kit:
    """An outbox with a wide window; what each sending's owner heard, and the frames that are on lanes."""

    def __init__(self) -> None:
        self.outbox = Outbox(bool, lambda sending: None)
        self.outbox.window = 1 << 30
        self.sent: list[Sending] = []
        self.heard: list[list[bool]] = []
        self.flying: list[Frame] = []

    def send(self, size: int, priority: Priority = Priority.NORMAL) -> Sending:
        heard: list[bool] = []
        self.heard.append(heard)
        self.sent.append(self.outbox.submit(b"head", Pieces([memoryview(bytes(size))]), priority, heard.append))
        return self.sent[-1]

    def fly(self) -> Frame | None:
        frame = self.outbox.next()
        if frame is not None:
            self.flying.append(frame)
        return frame

    def check(self) -> None:
        waiting = headers = 0
        for sending in self.sent:
            if sending.over:
                continue
            assert sending.payload is not None
            size = sending.payload.size
            waiting += size - sending.assigned
            waiting += sum(min(sending.slice_bytes, size - at) for at in sending.again)
            headers += 0 if sending.started else len(sending.header)
        assert (self.outbox.queued_bytes, self.outbox.queued_headers) == (waiting, headers)
        assert self.outbox.unacked_bytes == sum(frame.length for frame in self.flying)
        assert all(len(heard) == sending.over for heard, sending in zip(self.heard, self.sent, strict=True))


def test_a_slice_that_was_lost_but_is_not_missed_is_taken_out_of_the_queue() -> None:
    """It arrived; the acknowledgement was lost with its lane. That all is delivered says so."""
    kit = Kit()
    sending = kit.send(40)
    frames = [kit.fly() for _ in range(3)]
    assert kit.outbox.empty and None not in frames
    lost = kit.flying.pop(1)
    kit.outbox.lost([lost])
    assert kit.outbox.queued_bytes == 16 and sending.waits
    kit.outbox.delivered(Priority.NORMAL, 1)
    assert kit.heard == [[True]] and kit.outbox.queued_bytes == 0
    assert kit.fly() is None and kit.outbox.empty
    kit.check()


@settings(max_examples=300)
@given(st.integers(0, 1 << 32), st.integers(1, 60))
def test_whatever_becomes_of_frames_the_counts_are_right(seed: int, steps: int) -> None:
    kit, draw = Kit(), Random(seed)
    through = [0 for _ in Priority]
    for _ in range(steps):
        match draw.choice(["send", "fly", "fly", "arrive", "lose", "cancel", "deliver", "refuse"]):
            case "send":
                kit.send(draw.choice([0, 1, 16, 17, 50]), draw.choice(list(Priority)))
            case "fly":
                kit.fly()
            case "arrive" if kit.flying:
                kit.outbox.arrived(kit.flying.pop(draw.randrange(len(kit.flying))))
            case "lose" if kit.flying:
                draw.shuffle(kit.flying)
                count = draw.randint(1, len(kit.flying))
                lost, kit.flying = kit.flying[:count], kit.flying[count:]
                kit.outbox.lost(lost)
            case "cancel" if kit.sent:
                kit.outbox.cancel(draw.choice(kit.sent))
            case "deliver":
                priority = draw.choice(list(Priority))
                through[priority] = draw.randint(through[priority], kit.outbox.final_seqs[priority])
                kit.outbox.delivered(priority, through[priority])
            case "refuse" if kit.sent:
                one = draw.choice(kit.sent)
                if one.started:
                    kit.outbox.refused(one.priority, one.seq)
        kit.check()
    kit.outbox.end()
    for frame in kit.flying:
        kit.outbox.arrived(frame)
    kit.flying.clear()
    kit.check()
    assert all(sending.over for sending in kit.sent) and not kit.outbox.queued_bytes
