from __future__ import annotations

import pytest

from isthmus.core.cost import ENGINES, HARDWARE, engine_coefficients, hardware_named
from isthmus.core.errors import ConfigError


def test_within_a_generation_nothing_moves() -> None:
    assert engine_coefficients("vllm", hardware_named("h100")) == ENGINES["vllm"]
    assert engine_coefficients("trtllm", hardware_named("h20")) == ENGINES["trtllm"]


def test_across_generations_kernels_move_and_overheads_stay() -> None:
    here, there = ENGINES["trtllm"], engine_coefficients("trtllm", hardware_named("b200"))
    assert there.weight_read < here.weight_read
    assert there.matmul < here.matmul
    assert (there.layer_s, there.sequence_s, there.link) == (here.layer_s, here.sequence_s, here.link)


def test_only_one_kernel_reads_kv_slowly() -> None:
    h200, b200 = hardware_named("h200"), hardware_named("b200")
    assert engine_coefficients("vllm", h200).kv_read < 0.4
    assert engine_coefficients("vllm", h200, kv_dtype="bf16").kv_read > 0.8
    assert engine_coefficients("vllm", b200).kv_read > 0.8


@pytest.mark.parametrize("name", sorted(HARDWARE))
@pytest.mark.parametrize("weights", ["fp8", "bf16", "nvfp4", "int4", "fp32"])
def test_every_combination_stays_physical(name: str, weights: str) -> None:
    """Building checks the bounds."""
    for engine in ENGINES:
        assert engine_coefficients(engine, hardware_named(name), weight_dtype=weights, kv_dtype="bf16")


def test_an_unknown_engine_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match="engine 'vlm' has no cost coefficients; did you mean 'vllm'"):
        engine_coefficients("vlm", hardware_named("h100"))


@pytest.mark.parametrize(
    ("field", "value"), [("weight_read", 1.01), ("matmul", 0.0), ("layer_s", -1e-6), ("one_shot", 1.5)]
)
def test_what_breaks_physics_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"cost coefficient {field} is {value}"):
        ENGINES["vllm"].but(**{field: value})
