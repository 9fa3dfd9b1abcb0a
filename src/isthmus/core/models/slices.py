"""A model's layers cut at its attentions: n of them make n + 1 slices (the converter of Lamina, arXiv 2405.01814v2).

Attention may be computed elsewhere, so a batch stops there and goes on later, perhaps on another device. What it has to
keep meanwhile is the least there can be: a minimum cut between what attention takes and what takes its sums, in the
graph without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from isthmus.core.models.cut import ENDLESS, Node, min_cut
from isthmus.core.models.graph import ATTEND, Graph, Operator


class Slice(msgspec.Struct, frozen=True):
    """`first`: the queries of the attention that follows, and all that they need; these are sent then. `rest`: all else
    that is computed before it. At their end keys and values are sent. `carried`: values that are taken later. The last
    slice has no `attention`."""

    first: tuple[Operator, ...]
    rest: tuple[Operator, ...]
    attention: Operator | None
    carried: tuple[str, ...]


def slices_of(graph: Graph) -> tuple[Slice, ...]:
    """In the order of the graph's attentions."""
    return tuple(_Cutter(graph).slices())


class _Cutter:
    def __init__(self, graph: Graph) -> None:
        self._graph, self._sizes = graph, dict(graph.sizes)
        self._giver = {value: operator for operator in graph.operators for value in operator.gives}
        self._takers: dict[str, list[Operator]] = {value: [] for value in self._sizes}
        for operator in graph.operators:
            for value in operator.takes:
                self._takers[value].append(operator)
        self._done: set[Operator] = set()

    def slices(self) -> Iterator[Slice]:
        for attention in [each for each in self._graph.operators if each.kind == ATTEND]:
            here = self._before(attention)
            queries = self._needed(attention.takes[:1])
            new = [each for each in self._graph.operators if each in here and each not in self._done]
            self._done = here
            carried = tuple([value for value in self._sizes if self._crosses(value, attention)])
            self._done |= {attention}
            first, rest = (
                tuple([each for each in new if (each in queries) is wanted]) for wanted in (True, False)
            )
            yield Slice(first, rest, attention, carried)
        rest = tuple([each for each in self._graph.operators if each not in self._done])
        yield Slice((), rest, None, self._graph.gives)

    def _before(self, attention: Operator) -> set[Operator]:
        """All that is computed before this attention, on the near side of the minimum cut."""
        needed = self._done | self._needed(attention.takes)
        waits = self._waiting()
        free = [each for each in self._graph.operators if each not in needed and each not in waits]
        sides = dict.fromkeys(needed, "near") | dict.fromkeys(waits, "far")
        edges = self._edges(attention, lambda each: sides.get(each, each))
        weight, far = min_cut(edges, "near", "far")
        assert weight < ENDLESS, "what attention takes does not depend on its sums"
        return needed | {each for each in free if each not in far}

    def _edges(self, attention: Operator, side: Callable[[Operator], Node]) -> Iterator[tuple[Node, Node, int]]:
        """Of the graph without this attention. A value is kept once, whoever takes it; and nothing is computed before
        what it needs."""
        for value, size in self._sizes.items():
            giver = self._giver.get(value)
            start: Node = "near" if giver is None else side(giver)
            stops = {side(taker) for taker in self._takers[value] if taker is not attention} - {start}
            if value in self._graph.gives:
                stops.add("far")
            if start == "far" or not stops - {"near"}:
                continue
            yield start, value, size
            for stop in stops:
                yield value, stop, ENDLESS
                if stop != "far" and start != "near":
                    yield stop, start, ENDLESS

    def _crosses(self, value: str, attention: Operator) -> bool:
        giver = self._giver.get(value)
        if giver is not None and giver not in self._done:
            return False
        takers = [each for each in self._takers[value] if each is not attention]
        return value in self._graph.gives or any(each not in self._done for each in takers)

    def _needed(self, values: Iterable[str]) -> set[Operator]:
        """What must be computed for these values and is not yet."""
        found, new = set[Operator](), list(values)
        while new:
            giver = self._giver.get(new.pop())
            if giver is not None and giver not in self._done and giver not in found:
                found.add(giver)
                new += giver.takes
        return found

    def _waiting(self) -> set[Operator]:
        """What needs the sums of an attention that is not computed yet, and these."""
        found = set[Operator]()
        for operator in self._graph.operators:
            waits = operator.kind == ATTEND and operator not in self._done
            if waits or any(self._giver.get(value) in found for value in operator.takes):
                found.add(operator)
        return found
