from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus.core.scheduler.tiers import Change, ReadAhead, TierCache
from isthmus.core.types import BlockName

Chain = tuple[BlockName, ...]


def chain(path: str) -> Chain:
    """Names of the blocks of "abc": "a", "ab", "abc". A name says what comes before it."""
    return tuple(cast(BlockName, path[: end + 1]) for end in range(len(path)))


@dataclass
class PlainCache:
    """The same rules the plain way: leaves are searched for, and victims go one by one."""

    capacities: tuple[int, int]
    tiers: tuple[list[str], list[str]] = field(
        default_factory=lambda: ([], [])
    )  # in order of last use or arrival
    pins: list[str] = field(default_factory=list)

    def held(self) -> set[str]:
        return {*self.tiers[0], *self.tiers[1]}

    def victim(self, level: int, spared: list[str]) -> str | None:
        """Of the tier's blocks that no block in it follows, the one to go first."""
        tier = self.tiers[level]
        leaves = [name for name in tier if not any(other[:-1] == name for other in tier)]
        return next((name for name in leaves if name not in spared and name not in self.pins), None)

    def put(self, names: list[str]) -> tuple[set[str], set[str], set[str], set[str]]:
        """Returns what was stored, evicted, demoted and promoted."""
        dram, ssd = self.tiers
        were = (set(dram), set(ssd))
        for name in reversed(names):
            for tier in self.tiers:
                if name in tier:
                    tier.remove(name)
            dram.append(name)
        victims, below = [], []
        while len(dram) > self.capacities[0]:
            name = self.victim(0, names)
            (below if name is None else victims).append(name or max(set(names) & set(dram), key=len))
            dram.remove((victims if name else below)[-1])
        ssd += victims + below
        while len(ssd) > self.capacities[1]:
            ssd.remove(self.victim(1, below) or below.pop(0))
        before = were[0] | were[1]
        return self.held() - before, before - self.held(), set(ssd) - were[1], set(dram) & were[1]

    def remove(self, name: str) -> None:
        for tier in self.tiers:
            tier[:] = [other for other in tier if not other.startswith(name)]


class TiersMachine(RuleBasedStateMachine):
    paths = st.text("ab", min_size=1, max_size=7)

    @initialize(capacities=st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 1, 4, 9])))
    def start(self, capacities: tuple[int, int]) -> None:
        self.cache = TierCache(*capacities)
        self.plain = PlainCache(capacities)
        self.pinned: list[Chain] = []
        self.heard: set[BlockName] = set()  # what a listener to the changes believes to be here

    def hear(self, change: Change) -> None:
        assert not self.heard & {*change.stored, *change.sunk}
        assert self.heard >= set(change.evicted)
        self.heard |= {*change.stored, *change.sunk}
        self.heard -= set(change.evicted)

    @rule(path=paths)
    def put(self, path: str) -> None:
        names = chain(path)
        change = self.cache.put(names)
        self.hear(change)
        fresh = change.stored + change.sunk
        assert fresh == names[change.start : change.start + len(fresh)], (
            "what is new is one stretch of the chain"
        )
        reported = (fresh, change.evicted, change.demoted + change.sunk, change.promoted)
        assert tuple(set(names) for names in reported) == self.plain.put(cast(list[str], list(names)))
        assert all(len(set(names)) == len(names) for names in reported)

    @rule(path=paths, ahead=st.booleans())
    def pin(self, path: str, ahead: bool) -> None:
        names = chain(path)
        names = names if ahead else names[: self.cache.match(names)[0]]
        self.cache.pin(names)
        self.pinned.append(names)
        self.plain.pins += cast(Chain, names)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        names = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.cache.unpin(names)
        for name in names:
            self.plain.pins.remove(cast(str, name))

    @rule(path=paths)
    def remove(self, path: str) -> None:
        change = self.cache.remove([chain(path)[-1]])
        self.hear(change)
        self.plain.remove(path)

    @invariant()
    def same(self) -> None:
        self.cache.check()
        assert set(self.cache.dram.held) == set(self.plain.tiers[0])
        assert set(self.cache.ssd.held) == set(self.plain.tiers[1])
        assert self.heard == self.plain.held()

    @rule(path=paths)
    def match(self, path: str) -> None:
        names = chain(path)
        on_ssd = [name for name in names if name in self.plain.tiers[1]]
        assert self.cache.match(names) == (sum(name in self.plain.held() for name in names), len(on_ssd))


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=80, stateful_step_count=40)


def test_beside_pinned_blocks_what_fits_is_stored() -> None:
    cache = TierCache(4)
    cache.put(chain("abc"))
    cache.pin(chain("abc"))
    assert cache.put(chain("xyz")) == Change(stored=("x",))
    assert cache.put(chain("pq")) == Change(stored=("p",), evicted=("x",))
    cache.unpin(chain("abc"))
    assert cache.put(chain("xyz")).stored == chain("xyz")
    assert cache.match(chain("abc"))[0] <= 1


def test_pins_are_counted_and_a_prefix_may_be_pinned_apart() -> None:
    cache = TierCache(3)
    cache.put(chain("abc"))
    cache.pin(chain("ab"))
    cache.pin(chain("abc"))
    cache.unpin(chain("abc"))
    assert cache.put(chain("x")).evicted == ("abc",)
    assert cache.put(chain("y")).evicted == ("x",)
    cache.unpin(chain("ab"))
    assert cache.put(chain("z")).evicted == ("ab",)


def test_names_may_be_in_any_sequence() -> None:
    cache = TierCache(2, 1)
    assert cache.put(list(chain("abcd"))) == Change(stored=chain("ab"), sunk=("abc",))
    assert cache.match(list(chain("abcd"))) == (3, 1)
    assert cache.put([]) == Change()


def test_what_is_read_ahead_is_kept_until_no_load_waits_or_its_tier_is_decided() -> None:
    ahead, (a, ab, abc) = ReadAhead(), chain("abc")
    for names in ((a, ab, abc), (a, ab)):
        ahead.update(names)
    assert ahead.unread((a, ab, abc)) == [abc] and ahead.keys() == {a, ab}
    ahead.settle((ab, abc))
    ahead.update((abc,))
    assert ahead.unread((a, ab)) == [a], "it was decided where ab is"
    assert ahead.unread((ab, abc)) == [abc] and not ahead
