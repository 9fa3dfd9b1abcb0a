"""A model's layers as a graph of operators, and the graph cut into slices at its attentions.

An operator is what the engine computes in one go: queries, keys and values of an attention are one product where they
are one matrix.

n attentions cut the layers into n + 1 slices (the converter of Lamina, arXiv 2405.01814v2), since attention may be
computed elsewhere: a batch stops there and goes on later, perhaps on another device. It keeps as little as possible
meanwhile: a minimum cut, in the graph without the attention, between the values that it takes and the takers of its
sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import msgspec

from isthmus.core.models.spec import Attention, LatentAttention, LayerSpec, ModelSpec

ATTEND = "attend"
"""The kind of an attention: it takes queries first, then keys and values."""
INPUT = "x"
"""The value that there is before the first layer."""


class Operator(msgspec.Struct, frozen=True):
    """`kind`: what it computes. `takes` and `gives` name values; each is given once."""

    kind: str
    layer: int
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class Graph(msgspec.Struct, frozen=True):
    """`operators` in an order in which they can be computed. `sizes`: every value with its bytes a token; those that no
    operator gives are there from the start. `gives`: what is wanted of it all."""

    operators: tuple[Operator, ...]
    sizes: tuple[tuple[str, int], ...]
    gives: tuple[str, ...]


def graph_of(spec: ModelSpec, layers: tuple[int, int], item_bytes: int) -> Graph:
    """Of a half-open range of layers, whose results are the residual stream `x` and what the next norm adds to it.
    `item_bytes`: of a number on its way through the layers."""
    builder = _Builder(spec.hidden_size, item_bytes)
    for index in range(*layers):
        builder.layer(index, spec.layers[index])
    return builder.graph()


class _Builder:
    def __init__(self, hidden: int, item_bytes: int) -> None:
        self._hidden, self._item_bytes = hidden, item_bytes
        self._operators: list[Operator] = []
        self._sizes = {INPUT: hidden * item_bytes}
        self._residual: tuple[str, ...] = (INPUT,)

    def graph(self) -> Graph:
        return Graph(tuple(self._operators), tuple(self._sizes.items()), self._residual)

    def layer(self, index: int, layer: LayerSpec) -> None:
        """Pre-norm: the norm before each half of a layer adds what the half before it gave to the residual stream."""
        x, normed = self._add("norm", index, self._residual, x=self._hidden, normed=self._hidden)
        mixed = self._mixer(index, layer, normed)
        x, normed = self._add("mlp_norm", index, (x, mixed), after=self._hidden, mlp_normed=self._hidden)
        self._residual = x, *self._add("mlp", index, (normed,), delta=self._hidden)

    def _mixer(self, index: int, layer: LayerSpec, normed: str) -> str:
        mixer, gate = layer.mixer, tuple[str, ...]()
        if isinstance(mixer, Attention):
            queries = mixer.num_heads * mixer.head_dim
            kv = mixer.num_kv_heads * (mixer.head_dim + mixer.value_dim)
            inputs = self._add("project", index, (normed,), q=queries, kv=kv)
        elif isinstance(mixer, LatentAttention):
            queries = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
            inputs = self._add("queries", index, (normed,), q=queries)
            inputs += self._add("keep", index, (normed,), kv=mixer.kept_dim)
        else:
            return self._add("recur", index, (normed,), mixed=self._hidden)[0]
        outputs = mixer.num_heads * mixer.value_dim
        sums = self._add(ATTEND, index, inputs, sums=outputs)
        if mixer.gated:
            gate = self._add("gate", index, (normed,), gate=outputs)
        return self._add("output", index, sums + gate, mixed=self._hidden)[0]

    def _add(self, kind: str, layer: int, takes: tuple[str, ...], **gives: int) -> tuple[str, ...]:
        """`gives`: numbers a token. Returns the names."""
        names = tuple([f"{layer}.{name}" for name in gives])
        self._operators.append(Operator(kind, layer, takes, names))
        sizes = [numbers * self._item_bytes for numbers in gives.values()]
        self._sizes.update(zip(names, sizes, strict=True))
        return names


class Slice(msgspec.Struct, frozen=True):
    """Operators before an `attention`, of which the last slice has none. `first`: those that its queries need, which
    are sent then; `rest`: all others, after which keys and values are sent. `carried`: values that are taken
    later."""

    first: tuple[Operator, ...]
    rest: tuple[Operator, ...]
    attention: Operator | None
    carried: tuple[str, ...]


def slices_of(graph: Graph) -> tuple[Slice, ...]:
    """The slices of a graph, in the order of its attentions."""
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
        """Operators computed before this attention, on the near side of the minimum cut."""
        needed = self._done | self._needed(attention.takes)
        waits = self._waiting()
        free = [each for each in self._graph.operators if each not in needed and each not in waits]
        sides = dict.fromkeys(needed, "near") | dict.fromkeys(waits, "far")
        edges = self._edges(attention, lambda each: sides.get(each, each))
        weight, far = min_cut(edges, "near", "far")
        assert weight < ENDLESS, "what attention takes does not depend on its sums"
        return needed | {each for each in free if each not in far}

    def _edges(self, attention: Operator, side: Callable[[Operator], Node]) -> Iterator[tuple[Node, Node, int]]:
        """Edges of the graph without this attention. A value is kept once for all its takers, and nothing is computed
        before the values that it takes."""
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
        """Operators that these values need and that are not computed yet."""
        found, new = set[Operator](), list(values)
        while new:
            giver = self._giver.get(new.pop())
            if giver is not None and giver not in self._done and giver not in found:
                found.add(giver)
                new += giver.takes
        return found

    def _waiting(self) -> set[Operator]:
        """Attentions that are not computed yet, and operators that need their sums."""
        found = set[Operator]()
        for operator in self._graph.operators:
            waits = operator.kind == ATTEND and operator not in self._done
            if waits or any(self._giver.get(value) in found for value in operator.takes):
                found.add(operator)
        return found


# The minimum cut of a small network weighs as much as its largest flow (Ford and Fulkerson, 1956); shortest paths first
# (Edmonds and Karp, 1972).

Node = Hashable
Capacities = dict[Node, dict[Node, int]]
"""What each edge can still take, backwards too."""

ENDLESS = 1 << 62
"""Of an edge that may not be cut."""


def min_cut(edges: Iterable[tuple[Node, Node, int]], source: Node, sink: Node) -> tuple[int, frozenset[Node]]:
    """`edges`: (from, to, weight), weights 0 or more. Returns the weight of what is cut, and all nodes on the sink's
    side: of several minimum cuts those of the one nearest to the sink. Nodes from which nothing gets there are not
    among them."""
    assert source != sink, "nothing can be cut between a node and itself"
    left: Capacities = defaultdict(dict)
    for start, stop, weight in edges:
        assert weight >= 0, "a flow has one direction"
        left[start][stop] = left[start].get(stop, 0) + weight
        left[stop].setdefault(start, 0)
    flow = 0
    while path := _path(left, source, sink):
        most = min(left[start][stop] for start, stop in path)
        for start, stop in path:
            left[start][stop] -= most
            left[stop][start] += most
        flow += most
    return flow, _reaching(left, sink)


def _path(left: Capacities, source: Node, sink: Node) -> list[tuple[Node, Node]]:
    """The edges of a shortest way on which more can flow; none if there is none."""
    came: dict[Node, Node] = {source: source}
    ring = [source]
    while ring and sink not in came:
        further = []
        for start in ring:
            for stop, most in left[start].items():
                if most and stop not in came:
                    came[stop] = start
                    further.append(stop)
        ring = further
    path, at = [], sink
    while at in came and at != source:
        path.append((came[at], at))
        at = came[at]
    return path[::-1]


def _reaching(left: Capacities, sink: Node) -> frozenset[Node]:
    found, new = {sink}, [sink]
    while new:
        at = new.pop()
        for before in left[at]:  # edges are in there both ways
            if left[before][at] and before not in found:
                found.add(before)
                new.append(before)
    return frozenset(found)
