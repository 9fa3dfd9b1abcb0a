"""What attention on other nodes takes: bytes that depend on no context, bounds by each of its terms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Curve, Part, Path, Queries, Wait, compile_cost, least_bandwidth, slowest
from isthmus.core.cost.elsewhere import SENT_BYTES, lines
from isthmus.core.cost.facts import facts_of
from isthmus.core.cost.pooled import period_ps
from tests.core.cost.models import CONFIGS, DEEPSEEK_V3, LLAMA_70B, QWEN3_NEXT, instance

RATES = st.floats(1e6, 1e12)
PARTS = st.lists(
    st.builds(
        Part,
        st.builds(Path, st.integers(0, 10**9), RATES),
        st.floats(0, 1e9),
        st.floats(0, 1e12),
    ),
    min_size=1,
    max_size=5,
)


def test_bytes_are_those_of_queries_and_sums() -> None:
    """Llama-3-70B: 80 layers of 64 heads of 128; there and back, and a weight a head."""
    queries = compile_cost(instance(LLAMA_70B)).queries
    assert queries == Queries(80 * 64 * 128, 80 * 64, 80)
    assert queries.num_bytes(1) == 80 * 64 * (128 + 129) * SENT_BYTES
    assert queries.num_bytes(3, 2) == 3 * 80 * 64 * (2 * 128 * 2 + 4)


def test_only_layers_whose_kv_grows_ask() -> None:
    hybrid = facts_of(QWEN3_NEXT)
    assert 0 < hybrid.kv_layers < hybrid.num_layers
    latent = facts_of(DEEPSEEK_V3)
    assert latent.query_elements == latent.query_heads * latent.kv_elements // latent.kv_layers


def test_a_curve_that_says_nothing_of_queries_counts_them_as_its_kv() -> None:
    unknown = compile_cost(Curve(4096, 2, 1e-5)).queries
    assert unknown == Queries(1024, 0, 2) and unknown.num_bytes(1) == 2 * 4096
    assert compile_cost(Curve(4096, 2, 1e-5, query_elements=64, query_heads=8)).queries == Queries(64, 8, 2)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_attention_alone_is_what_context_adds(config: dict[str, object]) -> None:
    cost = compile_cost(instance(config))
    per_token = cost.decode_step_ps(1)[1]
    assert per_token - 1 <= cost.attend_ps(1, 1000) / 1000 or cost.attend_ps(1, 1000) >= 1000 * (per_token - 1)
    assert cost.attend_ps(512, 1000) >= cost.attend_ps(1, 1000)


def test_attention_of_a_curve_is_what_it_measured() -> None:
    cost = compile_cost(Curve(1000, 4, 1e-4, prefill_pair_s=1e-8, decode_context_s=1e-9))
    assert cost.attend_ps(1, 500) == 500 * 1000
    assert cost.attend_ps(64, 500) == pytest.approx(1e12 * 64 * 1e-8 * 2 * 500)
    assert cost.attend_ps(64, 500) == pytest.approx(
        cost.step_ps([(64, 500)], 0, 0) - cost.step_ps([(64, 0)], 0, 0)
    )


def test_one_part_by_hand() -> None:
    """3 layers of 5 us, 1 MB at 1 GB/s, 2 ms of attention."""
    part = Part(Path(5_000_000, 1e9), 1e6, 2e9)
    assert slowest([part], 3, 1e12) == (15_000_000, 1_000_000_000, 2_000_000_000)
    assert slowest([part], 3, 1e8) == (15_000_000, 10_000_000_000, 2_000_000_000), "the home's own link"
    assert slowest([part, part], 3, 1e9) == (15_000_000, 2_000_000_000, 2_000_000_000)


@given(PARTS, st.integers(1, 100), RATES)
def test_the_slowest_is_waited_for(parts: list[Part], layers: int, home: float) -> None:
    found = slowest(parts, layers, home).whole
    alone = max(slowest([part], layers, home).whole for part in parts)
    together = 1e12 * sum(part.num_bytes for part in parts) / home
    assert alone - 1 <= found <= alone + together + 1
    assert slowest(parts, layers, 2 * home).whole <= found


PS = st.integers(0, 10**12)


@given(st.integers(2, 8), PS, PS, PS, st.builds(Wait, PS, PS, PS))
def test_turns_are_those_of_the_closed_form(
    batches: int, model: int, own: int, growth: int, wait: Wait
) -> None:
    """With two batches exactly; more have no further device here, so that they are no quicker than with replicas."""
    bound = max(first for first, _ in lines(batches, model, own, growth, wait))
    part = [-(-each // batches) for each in (own, wait.wire, wait.attend)]
    replica = period_ps(batches, model + part[0], part[2], wait.rtt + part[1])
    assert bound == replica if batches == 2 else bound >= replica


@given(PS, PS, PS, st.builds(Wait, PS, PS, PS))
def test_one_batch_lasts_as_long_as_the_slower_part(model: int, own: int, growth: int, wait: Wait) -> None:
    assert lines(1, model, own, growth, wait) == [(model + own, growth), (model + sum(wait), 0)]


def test_the_least_bandwidth_of_lamina() -> None:
    """70B, batch 300: 0.885 GB an iteration; 49 ms with a slack of a fifth need 90 GB/s."""
    sent = 300 * 80 * (2 * 8192 + 2 * 1024) * 2
    assert sent == pytest.approx(0.885e9, rel=1e-3)
    assert least_bandwidth(sent, 0.030, 0.019, 0.2) == pytest.approx(90.3e9, rel=1e-3)
