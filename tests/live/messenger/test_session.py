"""Sessions without I/O: whatever is lost, cancelled, refused or late, at any step."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import ProtocolError
from isthmus.live.messenger import Priority, Terms, inbox, lane, outbox, session
from isthmus.live.messenger.frames import GOOD, MAX_HEADER, MAX_SLICE, PREFIX_BYTES, FrameKind, prefix_of

from .pair import Pair, Parcel, Side, content, number_of

PRIORITIES = st.sampled_from(Priority)
SIZES = st.sampled_from([0, 0, 1, 5, 16, 17, 40, 100, 300])


@pytest.fixture(autouse=True, scope="module")
def _small_slices() -> Iterator[None]:
    """So that a few hundred bytes are many slices and many batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "SLICE", 16)
        patch.setattr(outbox, "HEADERS_PER_SLICE", 0)
        patch.setattr(lane, "WRITE_BYTES", 150)
        yield


OPERATIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), PRIORITIES, SIZES),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 3), st.integers(1, 400)),
    st.tuples(st.just("write"), st.integers(0, 1), st.integers(0, 3), st.integers(1, 400)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(0, 3), st.integers(1, 400)),
    st.tuples(st.just("read"), st.integers(0, 1), st.integers(0, 3), st.integers(1, 400)),
    st.tuples(st.just("cancel"), st.integers(0, 1), st.integers(0, 30), st.none()),
    st.tuples(st.just("refuse"), st.integers(0, 1), st.integers(0, 30), st.none()),
    st.tuples(st.just("lose"), st.integers(0, 1), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("add"), st.none(), st.none(), st.none()),
    st.tuples(st.just("time"), st.none(), st.none(), st.sampled_from([0.0, 0.001, 1.0])),
)


def perform(pair: Pair, operation: tuple) -> None:
    what, side, which, value = operation
    match what:
        case "send":
            number = len(pair.sides[0].sent) + len(pair.sides[1].sent)
            pair.sides[side].send(value, which, number, first=value // 2)
        case "write" | "read":
            if pair.cables:
                cable = pair.cables[-1 - which % len(pair.cables)]
                getattr(cable, what)(side, value)
        case "cancel":
            sent = pair.sides[side].sent
            if sent and not sent[which % len(sent)].heard:
                pair.sides[side].cancel(sent[which % len(sent)])
        case "refuse":
            placed = list(pair.sides[side].placed)
            if placed:
                pair.sides[side].refuse(placed[which % len(placed)])
        case "lose":
            cable = pair.cables[-1 - which % len(pair.cables)]
            cable.lose(side)
            if value:
                cable.lose(1 - side)
        case "add":
            if len(pair.live) < 4:
                pair.add_cable()
        case "time":
            pair.clock.run_soon()
            pair.clock.pass_time(value)


@settings(max_examples=400)
@given(
    st.integers(1, 3),
    st.sampled_from([60, 500, 1 << 20]),
    st.lists(OPERATIONS, max_size=80),
    st.integers(1, 1000),
)
def test_whatever_happens_each_payload_is_delivered_or_voided_once(
    cables: int, window: int, operations: list[tuple], chunk: int
) -> None:
    pair = Pair(Terms(window=window, resume_s=3600), cables)
    for operation in operations:
        perform(pair, operation)
        pair.check()
    for cable in pair.cables:  # what one end lost, the other learns of as well
        if not all(cable.open):
            cable.lose(0)
            cable.lose(1)
    if not pair.live:
        pair.add_cable()
    pair.settle(chunk)
    pair.check()
    for sender, receiver in (pair.sides, pair.sides[::-1]):
        delivered = {number for number, _ in receiver.delivered}
        assert all(len(sent.heard) == 1 for sent in sender.sent), "a sender was not told"
        kept = [sent for sent in sender.sent if sent.heard[0]]
        refused = {n for n, placed in receiver.placed.items() if placed.returned in ("refused", "voided")}
        assert {number_of(sent.sending) for sent in kept} <= delivered | refused
        assert all(placed.returned for placed in receiver.placed.values()), "memory was kept"
        stat = sender.session.stat()
        assert (stat.queued_bytes, stat.unacked_bytes) == (0, 0)
        assert sender.session._outbox.ahead_bytes == sender.session._outbox.ahead_kept == 0
        assert receiver.session._inbox._held_bytes == receiver.session._inbox._kept_bytes == 0
    pair.sides[0].session.close("enough")
    pair.settle(chunk)
    assert [side.reasons for side in pair.sides] == [["enough"], ["closed by the peer: enough"]]
    pair.check()


@settings(max_examples=200)
@given(
    st.lists(OPERATIONS, max_size=40),
    st.sampled_from(["close", "abort", "lose"]),
    st.integers(0, 1),
    st.integers(1, 500),
)
def test_however_it_ends_all_memory_comes_back(operations: list[tuple], how: str, who: int, chunk: int) -> None:
    pair = Pair(Terms(window=500, resume_s=0.0), 2)
    for operation in operations:
        if operation[0] in ("send", "write", "read", "cancel", "refuse"):
            perform(pair, operation)
    ending = pair.sides[who].session
    if how == "close":
        ending.close("enough")
    elif how == "abort":
        ending.abort("enough")
    else:
        for cable in pair.cables:
            cable.lose(0)
            cable.lose(1)
    pair.settle(chunk)
    pair.check()
    for side in pair.sides:
        assert len(side.reasons) == 1
        assert all(placed.returned for placed in side.placed.values())
        assert all(len(sent.heard) == 1 for sent in side.sent)
        assert side.session.closed
    if how == "close":
        sent_before = [sent for sent in pair.sides[who].sent if not sent.cancelled]
        other = pair.sides[1 - who]
        came = {number for number, _ in other.delivered}
        given_up = {n for n, placed in other.placed.items() if placed.returned == "refused"}
        assert {number_of(sent.sending) for sent in sent_before} <= came | given_up, (
            "close lost what was sent before"
        )


def test_urgent_messages_overtake_between_slices() -> None:
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    here.send(1000, Priority.NORMAL, 0)
    pair.cables[0].write(0, 1 << 30)
    here.send(0, Priority.CONTROL, 1)
    here.send(100, Priority.URGENT, 2)
    pair.settle()
    assert [number for number, _ in there.delivered] == [1, 2, 0]


def test_a_payload_that_is_refused_stops_coming() -> None:
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    sent = here.send(1000, Priority.NORMAL, 0)
    pair.cables[0].write(0, 1 << 30)
    pair.cables[0].read(1, 1 << 30)
    assert there.refuse(0) and not there.session.refuse(there.placed[0].message)
    here.send(10, Priority.NORMAL, 1)
    pair.settle()
    assert sent.heard == [False] and there.voided == []
    assert [number for number, _ in there.delivered] == [1]
    assert here.session.stat().bytes_out < 1000


def test_a_full_window_holds_payloads_back_but_no_messages() -> None:
    pair = Pair(Terms(window=100), 1)
    here, there = pair.sides
    for number in range(10):
        here.send(50, Priority.NORMAL, number)
    cable = pair.cables[0]
    while cable.write(0, 1 << 30):
        pass
    assert 100 <= here.session.stat().unacked_bytes < 100 + 200
    here.send(0, Priority.CONTROL, 10)
    assert cable.write(0, 1 << 30)
    while cable.read(1, 1 << 30):
        pass
    assert 10 in [number for number, _ in there.delivered]
    pair.settle()
    assert len(there.delivered) == 11


def test_messages_behind_a_missing_one_are_held_and_bounded() -> None:
    """One of two lanes brings nothing."""
    pair = Pair(Terms(window=200), 2)
    here, there = pair.sides
    for number in range(40):
        here.send(16, Priority.NORMAL, number)
    slow, fast = pair.cables
    slow.write(0, 1 << 30)
    for _ in range(100):
        fast.write(0, 1 << 30)
        fast.read(1, 1 << 30)
        pair.clock.pass_time(0.01)
        fast.write(1, 1 << 30)
        fast.read(0, 1 << 30)
    assert there.delivered == []
    assert here.session.stat().queued_bytes > 0
    assert here.session._outbox.ahead_bytes < 200 + 150
    pair.settle()
    assert [number for number, _ in there.delivered] == list(range(40))


def test_a_lane_that_stalls_alone_is_given_up() -> None:
    pair = Pair(Terms(), 2)
    here, there = pair.sides
    slow, fast = pair.cables
    here.send(16, Priority.NORMAL, 0)
    slow.write(0, 1 << 30)
    for number in range(1, 30):
        here.send(16, Priority.NORMAL, number)
        fast.write(0, 1 << 30)
        fast.read(1, 1 << 30)
        pair.clock.pass_time(1.0)
        fast.write(1, 1 << 30)
        fast.read(0, 1 << 30)
    assert slow.lanes[0] in here.gone
    assert here.session.stat().lanes_lost == 1 and here.session.stat().resent == 1
    pair.settle()
    assert [number for number, _ in there.delivered] == list(range(30))


def test_a_suspended_session_resumes_or_expires() -> None:
    for comes_back in (True, False):
        pair = Pair(Terms(resume_s=2.0), 1)
        here, there = pair.sides
        here.send(100, Priority.NORMAL, 0)
        pair.cables[0].write(0, 90)
        pair.cables[0].read(1, 90)
        pair.cables[0].lose(0)
        pair.cables[0].lose(1)
        assert here.session.suspended and there.session.suspended and not here.session.closed
        here.send(10, Priority.URGENT, 1)
        pair.clock.pass_time(1.9)
        if comes_back:
            pair.add_cable()
            pair.settle()
            assert [number for number, _ in there.delivered] == [1, 0]
            assert not here.reasons
        else:
            pair.clock.pass_time(0.2)
            assert here.reasons == there.reasons == ["lost"]
            assert there.voided == [0]
            assert [sent.heard for sent in here.sent] == [[False], [False]]


def test_closing_a_session_that_has_no_connection_just_now_ends_it_at_once() -> None:
    pair = Pair(Terms(resume_s=60.0), 1)
    here, _ = pair.sides
    sent = here.send(10, Priority.NORMAL, 0)
    pair.cables[0].lose(0)
    assert here.session.suspended
    here.session.close()
    assert not here.reasons, "never from within close"
    pair.clock.run_soon()
    assert here.reasons == ["closed here"] and sent.heard == [False]


def test_sending_on_a_closed_session_is_told() -> None:
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    here.session.close()
    sent = here.send(10, Priority.NORMAL, 0)
    assert sent.heard == []
    pair.settle()
    assert sent.heard == [False] and there.delivered == []


def test_a_peer_that_takes_nothing_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_BACKLOG", 1000)
    pair = Pair(Terms(), 1)
    here, _ = pair.sides
    for number in range(300):
        here.send(0, Priority.CONTROL, number)
    pair.settle()
    assert len(here.reasons) == 1 and "takes nothing" in here.reasons[0]
    assert all(sent.heard == [False] for sent in here.sent)


WRONG_FRAMES = {
    "an acknowledgement of what was not sent": (
        FrameKind.ACK,
        msgspec.msgpack.encode([[0, 0, 0, 0], [[0, 5]]]),
        {},
    ),
    "an acknowledgement that is none": (FrameKind.ACK, msgspec.msgpack.encode("what"), {}),
    "an end that is none": (FrameKind.CLOSE, b"\xc1", {}),
    "a second greeting": (FrameKind.HELLO, b"", {}),
    "an unknown kind": (99, b"", {}),
    "an unknown priority": (FrameKind.DATA, msgspec.msgpack.encode(Parcel(0)), {"priority": 4}),
    "a cancellation of one": (FrameKind.CANCEL, b"", {"priority": 200}),
    "a refusal of one": (FrameKind.REFUSE, b"", {"priority": 4}),
    "a cancellation with a payload": (FrameKind.CANCEL, b"", {"total": 4, "length": 4}),
    "a message that is none": (FrameKind.DATA, b"\xc1", {}),
    "a message of another type": (FrameKind.DATA, msgspec.msgpack.encode({"type": "Other"}), {}),
}


@pytest.mark.parametrize("wrong", WRONG_FRAMES.values(), ids=WRONG_FRAMES.keys())
def test_a_peer_that_breaks_the_rules_is_told_and_left(wrong: tuple[int, bytes, dict[str, int]]) -> None:
    kind, header, fields = wrong
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    here.send(5, Priority.NORMAL, 7)
    cable = pair.cables[0]
    cable.write(0, 1 << 30)
    cable.wires[0] += prefix_of(kind, header, **fields) + header
    pair.settle()
    assert [number for number, _ in there.delivered] == [7]
    assert len(there.reasons) == 1 and there.reasons[0]
    assert here.reasons == [f"closed by the peer: {there.reasons[0]}"]


def slice_of(offset: int, data: bytes, total: int, seq: int = 0) -> bytes:
    header = msgspec.msgpack.encode(Parcel(seq))
    where = {"total": total, "offset": offset, "length": len(data)}
    head = prefix_of(FrameKind.DATA, header, priority=Priority.NORMAL, seq=seq, **where)
    return head + header + data + GOOD[: len(data)]


def said(wire: bytes) -> Side:
    """What becomes of a side that is sent these bytes."""
    pair = Pair(Terms(), 1)
    pair.cables[0].wires[0] += wire
    pair.settle()
    return pair.sides[1]


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        (b"GET / HTTP/1.1\r\nHost: some.where.example\r\n\r\n", "does not speak this protocol"),
        (bytes(PREFIX_BYTES), "does not speak this protocol"),
        (prefix_of(FrameKind.DATA, b"x" * (MAX_HEADER + 1)), "limits"),
        (prefix_of(FrameKind.DATA, b"", total=MAX_SLICE + 1, length=MAX_SLICE + 1), "limits"),
        (prefix_of(FrameKind.DATA, b"", total=10, offset=5, length=6), "limits"),
        (prefix_of(FrameKind.DATA, b"abc") + b"abd", "damaged"),
        (slice_of(0, b"1", 1)[:-1] + b"?", "damaged"),
    ],
)
def test_what_is_no_frame_ends_the_session(wire: bytes, complaint: str) -> None:
    assert complaint in said(wire).reasons[0]


@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_never_a_message(garbage: bytes, well_begun: bool) -> None:
    assert not said(prefix_of(FrameKind.DATA, garbage[:20]) + garbage if well_begun else garbage).delivered


@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_of_prefix_header_or_verdict_is_found(at: int, bit: int) -> None:
    wire = bytearray(slice_of(0, content(0, 2), 2))
    at %= len(wire) - 2
    wire[at if at < len(wire) - 3 else -1] ^= 1 << bit
    assert not said(bytes(wire) + slice_of(0, b"", 0, seq=1)).delivered


def test_a_large_payload_is_received_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bytes that were read together with the header are copied."""
    monkeypatch.setattr(outbox, "SLICE", 1 << 20)
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    here.send(200_000, Priority.NORMAL, 0, first=100_000)
    cable = pair.cables[0]
    cable.write(0, 5000)
    cable.read(1, 5000)
    placed, (first, second, behind) = there.placed[0].memory, cable.lanes[1].reader.buffers()
    assert first.obj is second.obj is placed and behind.obj is not placed
    assert 195_000 < len(first) + len(second) < 200_000
    pair.settle()
    assert [number for number, _ in there.delivered] == [0]


@pytest.mark.parametrize(
    ("second", "complaint"),
    [(slice_of(3, b"123456", 10), "overlap"), (slice_of(4, b"1234", 9), "disagree on its length")],
)
def test_slices_that_do_not_fit_together_are_no_payload(second: bytes, complaint: str) -> None:
    pair = Pair(Terms(), 1)
    _, there = pair.sides
    pair.cables[0].wires[0] += slice_of(0, b"abcd", 10) + second
    pair.settle()
    assert there.delivered == [] and there.voided == [0]
    assert complaint in there.reasons[0]


def test_an_acknowledgement_that_is_lost_with_its_lane_is_given_again() -> None:
    pair = Pair(Terms(), 2)
    here, _ = pair.sides
    sent = here.send(10, Priority.NORMAL, 0)
    first, second = pair.cables
    first.write(0, 1 << 30)
    first.read(1, 1 << 30)
    pair.clock.pass_time(0.01)
    assert second.write(1, 1 << 30)
    second.lose(0)
    second.lose(1)
    pair.settle()
    assert sent.heard == [True]


@pytest.mark.parametrize("more", [1, -1])
def test_a_payload_fits_the_memory_it_is_given_or_goes_nowhere(more: int) -> None:
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    given = bytearray(b"\xee" * (10 + more))
    there.place = lambda session, message, size: [memoryview(given)]  # type: ignore[method-assign]
    there.on_void = lambda session, message: there.voided.append(message.number)  # type: ignore[method-assign]
    here.send(10, Priority.NORMAL, 0)
    pair.settle()
    assert there.delivered == [] and there.voided == [0]
    assert "does not fit the message" in there.reasons[0]
    assert given == b"\xee" * len(given)


def test_a_peer_that_sends_more_than_its_window_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "TALK_BYTES", 100)
    monkeypatch.setattr(inbox, "MAX_SLICE", 100)
    pair = Pair(Terms(window=100), 1)
    _, there = pair.sides
    wire = pair.cables[0].wires[0]
    for number in range(1, 30):
        header = msgspec.msgpack.encode(Parcel(number))
        wire += prefix_of(FrameKind.DATA, header, seq=number, total=8, length=8, priority=Priority.NORMAL)
        wire += header + bytes(8) + GOOD
    pair.settle()
    assert "more than it was allowed to" in there.reasons[0]
    assert 1 < len(there.placed) < 10 and there.voided == list(there.placed)


def raw(pair: Pair, header: bytes, seq: int, priority: Priority = Priority.CONTROL) -> None:
    pair.cables[0].wires[0] += prefix_of(FrameKind.DATA, header, seq=seq, priority=priority) + header


def kept(side: Side) -> int:
    """Bytes that lie in the session of this side for what is not delivered."""
    session = side.session
    return session._inbox._kept_bytes + sum(lane.reader.grown_bytes for lane in session.lanes)


def test_who_says_nothing_is_left_in_time() -> None:
    pair = Pair(Terms(), 1, first_s=5)
    _, there = pair.sides
    pair.clock.pass_time(4.9)
    assert not there.session.closed
    pair.clock.pass_time(0.2)
    pair.settle()
    assert there.reasons == ["nothing came in 5 s (limits.greeting_s)"]
    pair = Pair(Terms(), 1, first_s=5)
    here, there = pair.sides
    here.send(0, Priority.CONTROL, 0)
    pair.settle()
    pair.clock.pass_time(60)
    assert not there.reasons and [number for number, _ in there.delivered] == [0]


def test_an_owner_that_turns_the_first_message_away_has_learned_nothing() -> None:
    pair = Pair(Terms(), 1, first_s=5)
    here, there = pair.sides
    there.react = lambda message: there.session.close("no")
    here.send(0, Priority.CONTROL, 0)
    pair.settle()
    assert there.session._is_stranger and there.reasons == ["no"]


@pytest.mark.parametrize("priority", Priority)
def test_before_the_first_message_next_to_nothing_is_kept(priority: Priority) -> None:
    pair = Pair(Terms(), 1, first_s=5)
    raw(pair, bytes(65537), 1, priority)
    pair.settle()
    assert "a header of 65537 bytes came where 65536 may" in pair.sides[1].reasons[0]
    pair = Pair(Terms(), 1, first_s=5)
    there = pair.sides[1]
    for number in range(1, 100):
        raw(pair, bytes(1000), number, priority)
    seen = []
    while pair.cables[0].read(1, 1000):
        seen.append(kept(there))
    pair.settle()
    assert max(seen) <= 66 << 10 and "more than it was allowed to" in there.reasons[0]
    pair = Pair(Terms(), 1, first_s=5)
    for number in range(1, 100):
        pair.cables[0].wires[0] += prefix_of(FrameKind.CANCEL, b"", seq=number, priority=priority)
    pair.settle()
    assert "more than it was allowed to" in pair.sides[1].reasons[0]


def test_what_may_be_kept_later_is_bounded_and_kept_as_it_came() -> None:
    pair = Pair(Terms(), 1, first_s=5)
    here, there = pair.sides
    here.send(0, Priority.CONTROL, 0)
    pair.settle()
    header = msgspec.msgpack.encode(Parcel(1)) + bytes(1 << 20)
    for number in range(2, 100):
        raw(pair, header, number)
    seen = []
    while pair.cables[0].read(1, 1 << 20):
        seen.append(kept(there))
    pair.settle()
    assert "more than it was allowed to" in there.reasons[0]
    assert 64 << 20 < max(seen) <= (64 << 20) + (18 << 20)


def test_a_sender_stops_before_its_peer_would_have_to_keep_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two lanes brings nothing."""
    monkeypatch.setattr(outbox, "TALK_BYTES", 10 << 10)
    pair = Pair(Terms(), 2)
    here, there = pair.sides
    for number in range(40):
        here.send(0, Priority.CONTROL, number)
    slow, fast = pair.cables
    slow.write(0, 1)
    while fast.write(0, 1 << 30):
        fast.read(1, 1 << 30)
    assert there.delivered == []
    assert 8 << 10 <= kept(there) <= here.session._outbox.ahead_kept < 12 << 10
    pair.settle()
    assert [number for number, _ in there.delivered] == list(range(40))
    assert here.session._outbox.ahead_kept == kept(there) == 0


def test_headers_under_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane brings a long header that is never whole."""
    monkeypatch.setattr(session, "MAX_GROWN", 1 << 20)
    pair = Pair(Terms(), 8)
    there = pair.sides[1]
    seen = []
    for cable in pair.cables:
        cable.wires[0] += prefix_of(FrameKind.DATA, bytes(16 << 20)) + bytes(400_000)
        while not there.session.closed and cable.read(1, 1 << 16):
            seen.append(kept(there))
    pair.settle()
    assert "more than it was allowed to" in there.reasons[0] and max(seen) < 3 << 20


@pytest.mark.parametrize("kind", [FrameKind.ACK, FrameKind.CLOSE, FrameKind.CANCEL, FrameKind.REFUSE])
def test_notices_are_short(kind: FrameKind) -> None:
    pair = Pair(Terms(), 1)
    pair.cables[0].wires[0] += prefix_of(kind, bytes(70_000))
    pair.settle()
    assert "a header of 70000 bytes came where 65536 may" in pair.sides[1].reasons[0]


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Terms(), 1)
    here, there = pair.sides
    with monkeypatch.context() as patch:
        patch.setattr(session, "MAX_HEADER", 5)
        with pytest.raises(ProtocolError, match="exceeds the limit of 5"):
            here.send(10, Priority.NORMAL, 0)
    assert here.session.stat().queued_bytes == 0 and here.session.stat().messages_out == 0
    here.send(10, Priority.NORMAL, 1)
    pair.settle()
    assert [number for number, _ in there.delivered] == [1]


@pytest.mark.parametrize("how", ["closed", "failed", "closed by the peer"])
def test_the_end_of_a_session_takes_so_long_and_no_longer(how: str) -> None:
    pair = Pair(Terms(), 2)
    here, there = pair.sides
    sent = here.send(100, Priority.NORMAL, 0)
    first, second = pair.cables
    if how == "closed by the peer":
        there.send(100, Priority.NORMAL, 1)
        first.write(1, 1 << 30)  # and is on its way for ever
        there.session.close()
        while second.write(1, 1 << 30) or second.read(0, 1 << 30):
            pass
    elif how == "closed":
        here.session.close()
    else:
        here.session.fail("it is broken")
    pair.clock.pass_time(session.LINGER_S - 0.1)
    assert not here.reasons
    pair.clock.pass_time(0.2)
    assert len(here.reasons) == 1 and here.session.ended
    assert sent.heard == [False]
