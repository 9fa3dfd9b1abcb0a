from __future__ import annotations

import pytest

from isthmus.core.errors import ConfigError
from isthmus.live.kv import fetches, handover
from tests.live.cluster import faults
from tests.live.cluster.fault_peers import Harm


def test_no_fault_makes_a_wrong_block_or_leaks_anything() -> None:
    found = faults.run(240, seed=4)
    assert found.reasons == []
    assert [row for row in found.rows if not row.is_clean] == []
    flips = [row for row in found.rows if row.fault == "flip"]
    assert sum(row.rounds for row in flips) == 240
    for row in flips:
        assert row.by_seal and row.by_checksum
        assert row.by_seal + row.by_checksum + row.by_protocol + row.by_session_end + row.unharmed == row.rounds
    assert {row.fault for row in found.rows} == {"flip", "lost of 1", "lost of 3", "cancel"}


@pytest.mark.parametrize("room", [fetches, handover])
def test_a_seal_that_is_not_checked_shows(room: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these rounds look at is able to show a wrong block."""
    monkeypatch.setattr(room, "EXACT", ())
    if room is fetches:
        monkeypatch.setattr(fetches, "seal", lambda data: b"no seal")
    found = faults.run(120, seed=1)
    assert sum(row.wrong_blocks for row in found.rows) > 0


def test_the_same_seed_does_the_same_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[list[int | None]] = [[], []]
    made = Harm.__init__
    for seen in places:

        def noted(self: Harm, fault: object, at: int | None, random: object, seen: list = seen) -> None:
            seen.append(at)
            made(self, fault, at, random)  # type: ignore[arg-type]

        monkeypatch.setattr(Harm, "__init__", noted)
        faults.run(12, seed=5)
    assert places[0] == places[1]


def test_too_few() -> None:
    with pytest.raises(ConfigError, match="too few"):
        faults.run(3)
