"""Curves: published fits come out exactly, tables are interpolated, files are read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import isthmus.core.cost
from isthmus.core.cost import Curve, Handling, compile_cost, curve_of, to_mapping
from isthmus.core.cost.transfer import CodecSpeed
from isthmus.core.errors import ConfigError
from isthmus.yaml_file import read_document
from tests.core.cost.test_node_cost import measured_curves

MOONCAKE = Curve(
    kv_token_bytes=327_680,
    num_layers=80,
    prefill_token_s=1.144e-4,
    prefill_pair_s=7.21e-10,
    decode_fixed_s=25e-3,
    decode_sequence_s=0.1e-3,
    decode_context_s=30e-9,
    origin="Mooncake, FAST'25, figure 14",
)
TABLE = Curve(
    kv_token_bytes=2048,
    num_layers=4,
    prefill_token_s=1e-5,
    prefill_fixed_s=1e-3,
    decode_points=((1, 1e-3), (4, 2.5e-3), (8, 3e-3)),
    decode_context_points=((1, 1e-7), (8, 8e-7)),
)
POINTS = Curve(2048, 4, prefill_points=((1024, 0.44), (8192, 0.72), (32_768, 1.84)))
HANDLED = replace(
    MOONCAKE,
    handling=Handling(
        save_byte_s=4e-10, send_layer_s=1e-4, send_byte_s=1e-9, shares_core=True, int8=CodecSpeed(0.5, 1e9, 2e9)
    ),
)

counts = st.integers(1, 10_000)


@pytest.mark.parametrize(("length", "cached"), [(8_192, 0), (8_192, 7_782), (131_072, 124_518)])
def test_a_fit_in_whole_lengths_is_the_same_numbers(length: int, cached: int) -> None:
    published = 1.144e-4 * (length - cached) + 7.21e-10 * (length**2 - cached**2)
    assert compile_cost(MOONCAKE).prefill_ns(length - cached, cached) == int(published * 1e9)


@pytest.mark.parametrize(
    ("batch", "fixed_us", "per_ps"),
    [(1, 1000, 100_000), (2, 1500, 200_000), (6, 2750, 600_000), (8, 3000, 800_000), (16, 4000, 800_000)],
)
def test_tables_are_interpolated_and_carried_on(batch: int, fixed_us: int, per_ps: int) -> None:
    assert compile_cost(TABLE).decode_step_ps(batch) == (fixed_us * 10**6, per_ps)


def test_a_table_keeps_its_first_value_below() -> None:
    curve = Curve(1, 1, 1e-5, decode_points=((4, 2e-3), (8, 3e-3)))
    assert compile_cost(curve).decode_step_ps(1) == compile_cost(curve).decode_step_ps(4)


@pytest.mark.parametrize(
    ("length", "seconds"),
    [(1, 0.44), (1024, 0.44), (4608, 0.58), (8192, 0.72), (20_480, 1.28), (32_768, 1.84), (57_344, 2.96)],
)
def test_measured_prefill_is_interpolated_and_carried_on(length: int, seconds: float) -> None:
    assert compile_cost(POINTS).prefill_ns(length, 0) == pytest.approx(seconds * 1e9, abs=1)


@given(measured_curves, st.lists(counts, min_size=1, max_size=4), counts)
def test_a_measured_prompt_in_chunks_takes_its_overhead_once_more_each(
    curve: Curve, chunks: list[int], p: int
) -> None:
    """T(n | p) = T(p + n) - T(p) + T(0)."""
    cost, total, start = compile_cost(curve), 0, p
    for n in chunks:
        total += cost.step_ps([(n, start)], 0, 0)
        start += n
    overhead = round(1e12 * curve.prefill_points[0][1]) * (len(chunks) - 1)
    assert total - overhead == pytest.approx(cost.step_ps([(start - p, p)], 0, 0), abs=len(chunks) + 1)


def test_a_chunk_longer_than_the_weights_hides_them() -> None:
    cost = compile_cost(MOONCAKE)
    chunk, decode, lone = cost.step_ps([(1000, 0)], 0, 0), cost.step_ps((), 8, 8000), 25_000_000_000
    assert cost.step_ps([(1000, 0)], 8, 8000) == chunk + decode - lone


@pytest.mark.parametrize("curve", [MOONCAKE, TABLE, POINTS, HANDLED])
def test_a_file_is_read_back(curve: Curve) -> None:
    assert curve_of(to_mapping(curve)) == curve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefil_token_s": 1.0}, "unknown key 'prefil_token_s'; did you mean 'prefill_token_s'"),
        ({"prefill_token_s": "fast"}, "Expected `float`"),
        ({"prefill_token_s": -1.0}, "prefill_token_s is -1.0; it must be a number, 0 or more"),
        ({"prefill_token_s": float("nan")}, "it must be a number, 0 or more"),
        ({"num_layers": 0}, "num_layers and kv_token_bytes must be above 0"),
        ({"handling": {"send_bytes_s": 1e-9}}, "unknown field `send_bytes_s`"),
        ({"handling": {"save_byte_s": -1}}, "handling: save_byte_s must be a number, 0 or more"),
        (
            {"handling": {"zstd": {"kept": 0, "encode_bytes_per_s": 1, "decode_bytes_per_s": 1}}},
            "kept of a codec",
        ),
        ({"decode_points": [[1, 0.1]]}, "give decode_points, or decode_fixed_s"),
        ({"decode_context_points": [[1, 0.1]]}, "give decode_context_points or decode_context_s"),
        ({"prefill_points": [[1, 0.1], [9, 0.2]]}, "give prefill_points, or prefill_fixed_s"),
        ({"prefill_token_s": 0, "prefill_pair_s": 0, "prefill_points": [[1, 0.1]]}, "needs two points or more"),
        (
            {"prefill_token_s": 0, "prefill_pair_s": 0, "prefill_points": [[9, 0.1], [1, 0.2]]},
            "must rise in tokens",
        ),
        (
            {"prefill_token_s": 0, "prefill_pair_s": 0, "prefill_points": [[1, 0.2], [9, 0.1]]},
            "never fall in seconds",
        ),
        ({"prefill_token_s": 0, "prefill_pair_s": 0, "prefill_points": [1, 0.2]}, "prefill_points"),
        ({"decode_fixed_s": 0, "decode_sequence_s": 0, "decode_points": [[4, 1], [2, 2]]}, "must rise"),
        ({"decode_fixed_s": 0, "decode_sequence_s": 0, "decode_points": [[1, 2], [2, 1]]}, "never fall"),
        ({"decode_fixed_s": 0, "decode_sequence_s": 0, "decode_points": [[0, 2]]}, "from 1"),
        ({"decode_fixed_s": 0, "decode_sequence_s": 0, "decode_points": [[1, -1]]}, "0 or more"),
    ],
)
def test_a_wrong_file_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        curve_of(to_mapping(MOONCAKE) | changes)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing required field `num_layers`"):
        curve_of({"kv_token_bytes": 1, "prefill_token_s": 1.0})
    with pytest.raises(ConfigError, match="give prefill_token_s or prefill_points"):
        curve_of({"kv_token_bytes": 1, "num_layers": 1})


@pytest.mark.parametrize("curve", [MOONCAKE, POINTS])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_an_engine_without_a_core_of_its_own_waits_for_what_is_done_to_kv(
    curve: Curve, leaves: bool, saved: bool
) -> None:
    handled = replace(curve, handling=HANDLED.handling)
    plain, shared = (compile_cost(each) for each in (curve, handled.with_kv_work(leaves=leaves, saved=saved)))
    for num_tokens in (4096, 10_000):
        byte_s = leaves * 1e-9 + saved * 4e-10
        more_s = leaves * curve.num_layers * 1e-4 + num_tokens * curve.kv_token_bytes * byte_s
        found = shared.prefill_ns(num_tokens, 0) - plain.prefill_ns(num_tokens, 0)
        assert found == pytest.approx(1e9 * more_s, abs=3)
    spare = replace(handled, handling=replace(handled.handling, shares_core=False))
    assert spare.with_kv_work(leaves=leaves, saved=saved) == spare


PROFILES = sorted((Path(isthmus.core.cost.__file__).parent / "profiles").iterdir())


def test_every_profile_is_a_curve_with_an_origin() -> None:
    assert len(PROFILES) == 8
    for path in PROFILES:
        curve = curve_of(read_document(path).values)
        assert "arXiv 2604.15039" in curve.origin and "nferred" in curve.origin
        cost = compile_cost(curve)
        times = [cost.prefill_ns(length, 0) for length in (1, 1_000, 10_000, 100_000)]
        assert times == sorted(times) and times[0] > 10**8
