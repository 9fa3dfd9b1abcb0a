"""Which processes a launcher starts and where; what is asked of whoever has not installed Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import Config, load_config
from isthmus.core.errors import ConfigError, StartError
from isthmus.live.cluster.launcher import (
    Launcher,
    LocalLauncher,
    Process,
    devices_of,
    launcher_of,
    trouble_of,
    with_ray,
)


def processes(settings: dict[str, Any]) -> Sequence[Process]:
    launcher, config = LocalLauncher(), load_config(None, settings)
    Launcher.prepare(launcher, config, Path(), {})
    return launcher._processes


def test_a_pipeline_group_is_a_process_for_each_stage() -> None:
    found = processes({"roles": {"prefill": {"count": 2, "pipeline": 2}, "decode": 1}})
    names = [("prefill-0", "prefill-0", 0), ("prefill-0.1", "prefill-0", 1), ("decode-0", "decode-0", 0)]
    assert [(process.name, process.place.node, process.stage) for process in found] == names


def test_nodes_are_on_this_machine_unless_it_is_said() -> None:
    assert isinstance(launcher_of(Config()), LocalLauncher)


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "isthmus.live.cluster.ray_launcher", raising=False)
    monkeypatch.delattr("isthmus.live.cluster.ray_launcher", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        launcher_of(Config(placement="ray"))
    said = "placement: ray needs ray, which is not installed: pip install 'isthmus[ray]'"
    assert str(caught.value) == said
    with pytest.raises(ConfigError, match=r"^--ray needs ray"):
        with_ray("--ray")


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (b'noise\n{"error":"no model"}\n', 3, "no model"),
        (b"", 1, "exit status 1"),
        (b"noise", -9, "exit status -9 (killed; is there enough memory?)"),
    ],
)
def test_why_a_node_ended(output: bytes, code: int, said: str) -> None:
    assert trouble_of(output, code) == said


VLLM = {
    "engine": {"kind": "vllm", "gpus": 2, "vllm": {"transfer": "nixl"}},
    "roles": {"prefill": 1, "decode": 1},
}
GPUS = [
    (None, ["0,1", "2,3"]),
    ("4,5,6,7", ["4,5", "6,7"]),
    ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
]


@pytest.mark.parametrize(("given", "expected"), GPUS)
def test_each_vllm_node_has_gpus_of_its_own(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    found = devices_of(processes(VLLM))
    assert found == dict(zip(["prefill-0", "decode-0"], expected, strict=True))


def test_with_too_few_gpus_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(StartError, match="2 nodes need 4 GPUs, CUDA_VISIBLE_DEVICES names 3: give more"):
        devices_of(processes(VLLM))


def test_on_cpus_nobody_is_given_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_of(processes({**VLLM, "engine.device": "cpu"})) == {}
