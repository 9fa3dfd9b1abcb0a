from __future__ import annotations

import pytest

from isthmus.cost import Curve, expected_error, outside
from tests.cost.models import CONFIGS, instance

CURVE = Curve(1024, 2, 1e-5, error=0.08, measured_batch=32, measured_tokens=4096)


def test_expected_errors() -> None:
    assert expected_error(instance()) == 0.10
    assert {expected_error(instance(CONFIGS[name])) for name in CONFIGS if name != "llama"} == {0.30}
    assert expected_error(CURVE) == 0.08
    assert expected_error(Curve(1024, 2, 1e-5)) is None
    assert expected_error(instance(gpu="cpu", num_gpus=1)) is None


def test_inside_nothing_is_said() -> None:
    assert outside(instance(), batch=64, context=8000, prompt=4000) == []
    assert outside(CURVE, batch=32, context=4096) == []
    assert outside(Curve(1024, 2, 1e-5), batch=999, context=10**6) == []


@pytest.mark.parametrize(
    ("words", "use"),
    [("batch 1 ", {"batch": 1}), ("context 50000", {"context": 50_000}), ("prompt length 64", {"prompt": 64})],
)
def test_outside_is_named(words: str, use: dict[str, int]) -> None:
    (line,) = outside(instance(), **use)
    assert words in line


def test_groups_links_experts_and_curves_are_named() -> None:
    assert "16 GPUs" in outside(instance(num_gpus=16))[0]
    assert "PCIe" in outside(instance(gpu="l40s"))[0]
    assert "defaults" in outside(instance(CONFIGS["gpt-oss"]))[0]
    assert len(outside(CURVE, batch=64, prompt=8000)) == 2
