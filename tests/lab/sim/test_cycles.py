"""While a simulation runs nothing looks for cycles; afterwards all is as it was."""

from __future__ import annotations

import gc

import pytest

from isthmus.lab.sim.simulation import no_cycles


def test_the_collector_rests_meanwhile_and_then_works_again() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a mistake"), no_cycles():
        assert not gc.isenabled()
        raise ValueError("a mistake")
    assert gc.isenabled()


def test_the_inner_of_two_does_not_wake_it() -> None:
    with no_cycles():
        with no_cycles():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
