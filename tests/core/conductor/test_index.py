from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.blocks import state_names
from isthmus.core.conductor.index import Levels, PrefixIndex, bits
from isthmus.core.types import BlockName

NUM_NODES, NUM_NAMES = 5, 8
ALL = (1 << NUM_NODES) - 1


class Naive:
    """The same as sets: for every block the nodes that hold it, have it on disk, or will have it."""

    def __init__(self) -> None:
        self.held: dict[BlockName, set[int]] = {}
        self.disk: dict[BlockName, set[int]] = {}
        self.coming: dict[BlockName, set[int]] = {}
        self.users: set[int] = set()

    def add(self, which: dict[BlockName, set[int]], node: int, names: list[BlockName]) -> None:
        self.users.add(node)
        for name in names:
            which.setdefault(name, set()).add(node)

    def remove(self, which: dict[BlockName, set[int]], node: int, names: list[BlockName]) -> list[BlockName]:
        """Returns those that had this node alone."""
        last = [name for name in names if which.get(name) == {node}]
        for name in names:
            which.get(name, set()).discard(node)
        return last

    def depth(self, node: int, names: list[BlockName], *, expected: bool) -> int:
        depth = 0
        for name in names:
            there = node in self.held.get(name, ()) or (expected and node in self.coming.get(name, ()))
            if not there:
                break
            depth += 1
        return depth


nodes = st.integers(0, NUM_NODES - 1)
some_names = st.lists(st.integers(0, NUM_NAMES - 1), unique=True)


def apply(index: PrefixIndex, naive: Naive, operation: str, node: int, names: list[BlockName]) -> None:
    bit = 1 << node
    match operation:
        case "store":
            index.store(bit, names)
            naive.add(naive.held, node, names)
            naive.remove(naive.disk, node, names)
        case "demote":
            index.demote(bit, names)
            naive.add(naive.held, node, names)
            naive.add(naive.disk, node, names)
        case "evict":
            gone = index.evict(bit, names)
            naive.remove(naive.disk, node, names)
            assert list(gone) == naive.remove(naive.held, node, names)
        case "expect":
            index.expect(bit, names)
            naive.add(naive.coming, node, names)
        case "unexpect":
            index.unexpect(bit, names)
            naive.remove(naive.coming, node, names)
        case "drop":
            index.drop(bit)
            naive.users.discard(node)
            for which in (naive.held, naive.disk, naive.coming):
                naive.remove(which, node, list(which))
    index.check()


def depths(levels: Levels) -> dict[int, int]:
    """By node; and the levels are in order, none empty, no node in two."""
    assert [depth for depth, _ in levels] == sorted({depth for depth, _ in levels})
    found: dict[int, int] = {}
    for depth, mask in levels:
        assert mask and not found.keys() & set(bits(mask))
        found.update(dict.fromkeys(bits(mask), depth))
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "demote", "evict", "expect", "unexpect", "drop"]),
            nodes,
            some_names,
            some_names,
        ),
        max_size=20,
    ),
    some_names,
    st.integers(1, ALL),
    st.integers(1, 3),
)
def test_it_says_what_sets_would(
    events: list[tuple[str, int, list[int], list[int]]], names: list[int], mask: int, count: int
) -> None:
    """Of a hybrid model a prefix reaches to the deepest state on it."""
    index, naive = PrefixIndex(), Naive()
    for operation, node, blocks, states in events:
        chain: list[BlockName] = [*blocks, *(part for name in states for part in state_names(name, count))]
        apply(index, naive, operation, node, chain)
    prefix: list[BlockName] = [*names]

    def with_state(node: int, *, expected: bool) -> int:
        for at in range(naive.depth(node, prefix, expected=expected), 0, -1):
            last = state_names(names[at - 1], count)[-1]
            if node in naive.held.get(last, ()) or (expected and node in naive.coming.get(last, ())):
                return at
        return 0

    for matches, depth in (
        (index.match(prefix, mask), lambda node, expected: naive.depth(node, prefix, expected=expected)),
        (index.match_states(prefix, mask, count), lambda node, expected: with_state(node, expected=expected)),
    ):
        for found, counts in zip(matches, (False, True), strict=True):
            assert depths(found) == {node: depth(node, counts) for node in bits(mask)}
    for node in range(NUM_NODES):
        on_disk = [name for name in prefix if node in naive.disk.get(name, ())]
        assert index.num_on_disk(1 << node, prefix) == len(on_disk)
    assert index.uses_disk == any(naive.disk.values())
    assert set(bits(index.users)) == naive.users
    assert index.num_blocks == sum(1 for holders in naive.held.values() if holders)


def test_nothing_is_kept_of_blocks_that_nobody_has() -> None:
    index = PrefixIndex()
    for round in range(50):
        names = list(range(100 * round, 100 * round + 100))
        for bit in (1, 2, 4):
            index.expect(bit, names)
            index.store(bit, names)
            index.demote(bit, names[50:])
            index.unexpect(bit, names)
        index.evict(1, names)
        index.evict(2, names)
        index.drop(4)
    assert index.num_blocks == 0 and not index.uses_disk
    assert index.match([0], 7) == ([(0, 7)], [(0, 7)])
