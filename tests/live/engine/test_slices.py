"""What is carried over an attention, and what comes first in a slice: known layers, and random graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.models import Attention, DeltaRule, Dense, LatentAttention, LayerSpec, ModelSpec
from isthmus.core.models.graph import ATTEND, Graph, Operator, Slice, graph_of, slices_of

N, HEADS, KV_HEADS, SIZE, WIDTH = 64, 4, 2, 16, 96
DENSE = Dense(WIDTH)


def attention(**fields: int | bool) -> Attention:
    return Attention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, value_dim=SIZE, **fields)  # type: ignore[arg-type]


LATENT = LatentAttention(num_heads=HEADS, rank=24, nope_dim=16, rope_dim=8, value_dim=16, scale=1.0)
DELTA = DeltaRule("gdn", 2, 4, 16, 16, 4)


def spec_of(*mixers: Attention | LatentAttention | DeltaRule) -> ModelSpec:
    layers = tuple([LayerSpec(mixer, DENSE) for mixer in mixers])
    return ModelSpec("x", 100, N, 100, 1e-5, None, layers, False, "float32")


def sizes_of(graph: Graph, values: Sequence[str]) -> int:
    return sum(dict(graph.sizes)[value] for value in values)


def kinds(piece: Slice) -> list[str]:
    """The program of a slice, with what is sent in it."""
    sent = [] if piece.attention is None else ["send q"], [] if piece.attention is None else ["send kv"]
    return [each.kind for each in piece.first] + sent[0] + [each.kind for each in piece.rest] + sent[1]


# ---- the engine's models


def test_of_a_plain_layer_only_the_residual_stream_is_carried() -> None:
    found = graph_of(spec_of(attention(), attention(), attention()), (0, 3), 2)
    slices = slices_of(found)
    assert [piece.carried for piece in slices[:-1]] == [("0.x",), ("1.x",), ("2.x",)]
    assert [sizes_of(found, piece.carried) for piece in slices[:-1]] == [N * 2] * 3
    assert [kinds(piece) for piece in slices] == [
        ["norm", "project", "send q", "send kv"],
        ["output", "mlp_norm", "mlp", "norm", "project", "send q", "send kv"],
        ["output", "mlp_norm", "mlp", "norm", "project", "send q", "send kv"],
        ["output", "mlp_norm", "mlp"],
    ]
    assert slices[-1].carried == ("2.after", "2.delta")


def test_latent_queries_are_sent_before_what_is_kept_is_computed() -> None:
    first, second, _ = slices_of(graph_of(spec_of(LATENT, LATENT), (0, 2), 4))
    assert kinds(first) == ["norm", "queries", "send q", "keep", "send kv"]
    assert kinds(second)[-3:] == ["send q", "keep", "send kv"] and second.carried == ("1.x",)


@pytest.mark.parametrize(("num_heads", "carried"), [(3, "gate"), (4, "gate"), (5, "normed")])
def test_a_gate_is_computed_on_the_side_where_less_is_carried(num_heads: int, carried: str) -> None:
    """4 heads of 16 numbers are as many as the hidden state has: then while others attend."""
    mixer = Attention(num_heads=num_heads, num_kv_heads=1, head_dim=16, value_dim=16, gated=True)
    [piece, _] = slices_of(graph_of(spec_of(mixer), (0, 1), 4))
    assert piece.carried == (("0.x", f"0.{carried}") if carried == "gate" else ("0.x", "0.normed"))
    assert ("gate" in kinds(piece)) is (carried == "gate")
    assert kinds(piece)[:3] == ["norm", "project", "send q"]


def test_recurrent_layers_lie_within_slices() -> None:
    slices = slices_of(graph_of(spec_of(DELTA, attention(), DELTA), (0, 3), 4))
    assert len(slices) == 2
    assert kinds(slices[0]) == ["norm", "recur", "mlp_norm", "mlp", "norm", "project", "send q", "send kv"]


def test_layers_of_a_stage_are_its_own() -> None:
    slices = slices_of(graph_of(spec_of(*[attention()] * 4), (2, 4), 4))
    assert len(slices) == 3 and {each.layer for piece in slices for each in (*piece.first, *piece.rest)} == {
        2,
        3,
    }


# ---- other layers


# ---- all graphs


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Operators that take any values before them, attentions among them."""
    values, operators = ["x"], list[Operator]()
    for index in range(draw(st.integers(1, 10))):
        attends = draw(st.booleans()) and len(values) >= 2
        count = 2 if attends else draw(st.integers(1, min(3, len(values))))
        takes = draw(st.permutations(values))[:count]
        operators.append(Operator(ATTEND if attends else "op", index, tuple(takes), (f"v{index}",)))
        values.append(f"v{index}")
    sizes = tuple([(value, draw(st.integers(1, 9))) for value in values])
    gives = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=2, unique=True))
    return Graph(tuple(operators), sizes, tuple(gives))


def computed(graph: Graph, operators: Sequence[Operator], known: dict[str, str]) -> None:
    """Values as the terms that gave them. Nothing is computed twice, or before what it takes."""
    for operator in operators:
        for value in operator.gives:
            assert value not in known
            known[value] = (
                f"{operator.kind}{operator.layer}({','.join(known[each] for each in operator.takes)})"
            )


@settings(max_examples=300)
@given(graphs())
def test_slices_one_after_the_other_are_the_whole(found: Graph) -> None:
    """With nothing kept over an attention but what is carried."""
    whole = {"x": "x"}
    computed(found, found.operators, whole)
    known, slices = {"x": "x"}, slices_of(found)
    assert [piece.attention for piece in slices[:-1]] == [
        each for each in found.operators if each.kind == ATTEND
    ]
    for piece in slices:
        computed(found, (*piece.first, *piece.rest), known)
        if piece.attention is not None:
            sums = {"x": "x"} | known
            computed(found, [piece.attention], sums)
            known = {value: known[value] for value in piece.carried} | {
                value: sums[value] for value in piece.attention.gives
            }
    assert {value: known[value] for value in slices[-1].carried} == {
        value: whole[value] for value in found.gives
    }


@settings(max_examples=300)
@given(graphs())
def test_queries_wait_for_nothing_that_they_do_not_need(found: Graph) -> None:
    givers = {value: each for each in found.operators for value in each.gives}
    for piece in slices_of(found)[:-1]:
        assert piece.attention is not None
        needed, new = set[Operator](), [piece.attention.takes[0]]
        while new:
            giver = givers.get(new.pop())
            if giver is not None:
                needed.add(giver)
                new += giver.takes
        assert set(piece.first) <= needed


@settings(max_examples=200)
@given(graphs())
def test_no_less_can_be_carried(found: Graph) -> None:
    """Over the first attention, of all ways to compute some of what does not need its sums before it."""
    piece, *_ = slices_of(found)
    if piece.attention is None:
        return
    sizes, order = dict(found.sizes), found.operators
    givers = {value: each for each in order for value in each.gives}

    def carried(near: set[Operator]) -> int | None:
        """None: it cannot be computed in this order."""
        if any(givers[value] not in near for each in near for value in each.takes if value in givers):
            return None
        far = [each for each in order if each not in near and each is not piece.attention]
        taken = {value for each in far for value in each.takes} | set(found.gives)
        return sum(sizes[value] for value in taken if value not in givers or givers[value] in near)

    near = {*piece.first, *piece.rest}
    rest = [each for each in order if each.kind != ATTEND]
    options = chain.from_iterable(combinations(rest, count) for count in range(len(rest) + 1))
    inputs = {givers[value] for value in piece.attention.takes if value in givers}
    sides = [set(option) for option in options if inputs <= set(option)]
    assert carried(near) == min(weight for side in sides if (weight := carried(side)) is not None)
    assert carried(near) == sum(sizes[value] for value in piece.carried)
