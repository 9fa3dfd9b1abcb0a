"""Any cost, computed or measured: its parts agree, and more work never takes less time."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.cost import Analytic, Cost, Curve, compile_cost, pipeline
from tests.core.cost.models import CONFIGS, instance

seconds = st.floats(0, 1, allow_nan=False)
instances: st.SearchStrategy[Analytic] = st.builds(
    lambda name, gpu, gpus, engine: instance(CONFIGS[name], gpu, gpus, engine=engine),
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from(["a100", "h100", "h200", "b200", "rtx4090"]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["vllm", "trtllm"]),
)
fitted_curves = st.builds(
    Curve,
    kv_token_bytes=st.integers(1, 10**6),
    num_layers=st.integers(1, 100),
    prefill_token_s=seconds,
    prefill_fixed_s=seconds,
    prefill_pair_s=st.floats(0, 1e-6),
    decode_fixed_s=seconds,
    decode_sequence_s=seconds,
    decode_context_s=st.floats(0, 1e-3),
)
measured_curves = st.builds(
    lambda lengths, times: Curve(
        1024, 2, prefill_points=tuple(zip(sorted(lengths), sorted(times), strict=True)), decode_fixed_s=0.01
    ),
    st.lists(st.integers(1, 20_000), min_size=3, max_size=3, unique=True),
    st.lists(seconds, min_size=3, max_size=3),
)
costs = instances | fitted_curves | measured_curves
batches, contexts = st.integers(1, 600), st.integers(0, 3_000_000)
tokens, cached = st.integers(1, 60_000), st.integers(0, 120_000)


@given(costs, tokens, cached, batches, contexts)
def test_prompts_and_decodes_alone_are_steps(cost: Cost, n: int, p: int, batch: int, context: int) -> None:
    """A decode step is exactly linear in its context."""
    node = compile_cost(cost)
    fixed, per = node.decode_step_ps(batch)
    assert isinstance(fixed, int) and isinstance(per, int)
    assert node.step_ps((), batch, context) == fixed + per * context
    assert node.prefill_ns(n, p) == node.step_ps([(n, p)], 0, 0) // 1000
    assert (node.prefill_ns(0, p), node.decode_step_ps(0)[0], node.step_ps((), 0, 0)) == (0, 0, 0)


@given(instances | fitted_curves, tokens, tokens, cached, contexts)
def test_more_work_is_never_less_time(cost: Cost, n: int, m: int, p: int, context: int) -> None:
    """Cached tokens save, and chunks cost."""
    node = compile_cost(cost)
    assert node.prefill_ns(n, p) <= min(node.prefill_ns(n + m, p), node.prefill_ns(n, p + m))
    assert node.prefill_ns(n, p) <= node.prefill_ns(n + p, 0) + 1
    assert node.step_ps((), n, p) <= min(node.step_ps((), n + m, p), node.step_ps((), n, p + context))
    if isinstance(cost, Analytic):
        assert node.prefill_ns(n + m, p) <= node.prefill_ns(n, p) + node.prefill_ns(m, p + n) + 1


@given(costs, st.lists(st.tuples(tokens, cached), min_size=1, max_size=4), batches, contexts)
def test_a_mixed_step_costs_at_least_its_parts_and_at_most_their_sum(
    cost: Cost, chunks: list[tuple[int, int]], batch: int, context: int
) -> None:
    node = compile_cost(cost)
    mixed = node.step_ps(chunks, batch, context)
    apart = [node.step_ps([chunk], 0, 0) for chunk in chunks] + [node.step_ps((), batch, context)]
    assert max(apart) - 1 <= mixed <= sum(apart) + len(apart)


@pytest.mark.parametrize("cost", [*map(instance, CONFIGS.values()), Curve(1024, 2, 1e-5)])
def test_a_cost_survives_the_wire(cost: Cost) -> None:
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(cost), type=Cost)
    assert back == cost
    node = compile_cost(back)
    assert node.step_ps([(512, 100)], 7, 9000) == compile_cost(cost).step_ps([(512, 100)], 7, 9000)
    assert (node.kv_token_bytes, node.state_bytes) == (cost.kv_token_bytes, cost.state_bytes)


def simulated(parts: list[int], stages: int) -> tuple[int, int]:
    """When the first and the last stage end, chunk by chunk: a chunk enters a stage when both are free."""
    free = [0] * stages
    for part in parts:
        ready = 0
        for stage in range(stages):
            free[stage] = ready = max(free[stage], ready) + part
    return free[0], free[-1]


@given(st.lists(st.integers(0, 10**15), max_size=20), st.integers(1, 9))
def test_a_pipeline_group_takes_what_its_simulation_takes(parts: list[int], stages: int) -> None:
    assert pipeline([part * stages for part in parts], stages) == simulated(parts, stages)
    occupancy, latency = pipeline(parts, stages)  # rounded up
    assert sum(parts) <= occupancy * stages < sum(parts) + stages * max(len(parts), 1)
    assert latency >= max([sum(parts) / stages, *parts])
