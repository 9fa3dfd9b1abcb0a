"""A model's layers as a graph of operators: what each takes, what it gives, and how much that is.

Operators are those that the engine computes in one go: queries, keys and values of one attention are one product where
they are one matrix.
"""

from __future__ import annotations

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
