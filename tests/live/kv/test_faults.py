from __future__ import annotations

from collections import Counter

from tests.live.kv import faults


def test_no_fault_makes_a_wrong_block_or_leaks_anything() -> None:
    found = dict(faults.rounds(180, seed=4))
    for case in faults.FLIPS:
        assert found[case]["a seal"] + found[case]["a checksum"] and found[case].total() == 30
    assert sum(found.values(), Counter())["a seal"], "a seal finds what no checksum does"
