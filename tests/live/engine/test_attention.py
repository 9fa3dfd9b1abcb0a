from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.live.engine.attention import Part, merge, partial

from .support import attention, largest_error, randn, visible

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


@dataclass(frozen=True)
class Case:
    """T queries, L keys cut into parts at `cuts` (first 0, last L; parts may be empty)."""

    num_queries: int
    num_kv_heads: int
    group: int
    head_dim: int
    cuts: tuple[int, ...]
    causal_from: int | None
    window: int
    dtype: torch.dtype

    @property
    def num_keys(self) -> int:
        return self.cuts[-1]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def tensors(self) -> tuple[Tensor, Tensor]:
        q = randn(self.num_queries, self.num_kv_heads * self.group, self.head_dim, seed=1)
        kv = randn(self.num_keys, 2, self.num_kv_heads, self.head_dim, seed=2)
        return q.to(self.dtype), kv.to(self.dtype)

    def part(self, start: int, stop: int) -> Part:
        q, kv = self.tensors()
        causal_from = None if self.causal_from is None else self.causal_from - start
        return partial(q, kv[start:stop], scale=self.scale, causal_from=causal_from, window=self.window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_keys = draw(st.integers(0, 40))
    cuts = draw(st.lists(st.integers(0, num_keys), max_size=6))
    causal = draw(st.booleans())
    return Case(
        num_queries=draw(st.integers(1, 9)),
        num_kv_heads=draw(st.integers(1, 4)),
        group=draw(st.integers(1, 5)),
        head_dim=draw(st.sampled_from([2, 8, 16, 20])),
        cuts=(0, *sorted(cuts), num_keys),
        causal_from=draw(st.integers(-3, num_keys + 3)) if causal else None,
        window=draw(st.integers(0, 45)) if causal else 0,
        dtype=draw(st.sampled_from(list(TOLERANCE))),
    )


def assert_close(found: Part, expected: Part, tolerance: float) -> None:
    (out, lse), (expected_out, expected_lse) = found, expected
    hidden = expected_lse.isneginf()
    assert torch.equal(lse.isneginf(), hidden)
    assert (out[hidden] == 0).all()
    assert largest_error(out, expected_out) <= tolerance
    assert largest_error(lse[~hidden], expected_lse[~hidden]) <= tolerance


@settings(max_examples=200)
@given(cases(), st.data())
def test_parts_however_cut_and_merged_are_attention_under_an_explicit_mask(
    case: Case, data: st.DataObject
) -> None:
    """lse is the natural logarithm of the sums; parts may be empty, and merge in any order, two by two too."""
    q, kv = case.tensors()
    seen = visible(case.num_queries, case.num_keys, case.causal_from, case.window)
    expected = attention(q, kv, seen, case.scale)
    parts = data.draw(st.permutations([case.part(start, stop) for start, stop in pairwise(case.cuts)]))
    for found in (
        case.part(0, case.num_keys),
        merge(parts),
        reduce(lambda one, other: merge((one, other)), parts),
    ):
        assert_close(found, expected, TOLERANCE[case.dtype])


def test_an_empty_part_changes_no_bit_of_the_others() -> None:
    q, kv = randn(3, 4, 8), randn(9, 2, 2, 8, seed=1)
    whole = partial(q, kv, scale=0.5)
    out, lse = merge([partial(q, kv[:0], scale=0.5), whole, partial(q, kv[:0], scale=0.5)])
    assert torch.equal(out, whole[0]) and torch.equal(lse, whole[1])


@pytest.mark.parametrize(("causal_from", "cuts"), [(None, [70]), (0, [70]), (30, [70]), (None, [1, 0, 40, 29])])
def test_bfloat16_is_as_good_as_its_rounding(causal_from: int | None, cuts: list[int]) -> None:
    q, kv = randn(40, 4, 16, dtype=torch.bfloat16), randn(70, 2, 2, 16, seed=1, dtype=torch.bfloat16)
    expected_out, expected_lse = attention(q, kv, visible(40, 70, causal_from), 0.25)
    parts = [partial(q, piece, scale=0.25, causal_from=causal_from) for piece in kv.split(cuts)]
    out, lse = merge(parts) if len(parts) > 1 else parts[0]
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert largest_error(out, expected_out) <= len(parts) ** 0.5 * 2**-7
    assert largest_error(lse, expected_lse) <= 2**-9


def test_scores_too_large_for_exp_stay_finite() -> None:
    """Scores of +-1,000 and parts that lie 2,000 apart: the heavier part alone decides."""
    q = torch.ones(1, 1, 2)
    kv = torch.tensor([500.0, -500.0])[:, None, None, None].expand(2, 2, 1, 2).clone()
    kv[:, 1] = torch.tensor([3.0, 7.0])[:, None, None]
    out, lse = merge([partial(q, kv[:1], scale=1.0), partial(q, kv[1:], scale=1.0)])
    assert torch.equal(out, torch.full((1, 1, 2), 3.0))
    assert float(lse) == 1000.0
