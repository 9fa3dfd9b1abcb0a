from __future__ import annotations

import msgspec
import pytest

from isthmus.core.cost import HARDWARE, hardware_named
from isthmus.core.errors import ConfigError


def test_the_table_has_what_deployments_name() -> None:
    wanted = {"a100", "a800", "h100", "h800", "h200", "h20", "b200", "l20", "l40s", "rtx4090", "cpu"}
    assert wanted == set(HARDWARE)
    assert all(HARDWARE[name].name == name for name in HARDWARE)


def test_no_peak_comes_from_a_sparse_data_sheet() -> None:
    assert HARDWARE["h100"].bf16_flops < 1e15
    assert all(hardware.fp8_flops < 2.1 * hardware.bf16_flops for hardware in HARDWARE.values())


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match="hardware 'h20o' is not known; did you mean 'h20'"):
        hardware_named("h20o")


def test_a_value_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="hardware h100: memory_bw must be above 0"):
        msgspec.structs.replace(HARDWARE["h100"], memory_bw=0.0)
