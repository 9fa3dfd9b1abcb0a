"""Which processes a launcher starts and where, and what machines say of themselves before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
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
from isthmus.live.cluster.machines import (
    Bundle,
    Machine,
    MachineQuestion,
    Report,
    Seat,
    check_seats,
    fair_threads,
    report_of,
    unplaced,
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


HERE = Report("10.0.0.1", "1.2", 9, "abc", "", "", 1000 << 20)
GIB = 2.0**30


def seat(name: str = "decode-0", num_bytes: int = 0, **differs: Any) -> Seat:
    return Seat(name, msgspec.structs.replace(HERE, **differs), num_bytes)


def test_machines_that_are_alike_will_do() -> None:
    check_seats(HERE, [seat(), seat(address="10.0.0.2", available_bytes=None, num_bytes=1 << 40)], "10.0.0.1")
    alone = msgspec.structs.replace(HERE, address="127.0.0.1")
    check_seats(alone, [seat(address="127.0.0.1")], "127.0.0.1")


@pytest.mark.parametrize(
    ("differs", "complaint"),
    [
        ({"version": "1.3"}, "decode-0 on 10.0.0.1: has isthmus 1.3, protocol 9; the head has 1.2, protocol 9"),
        ({"protocol": 8}, "has isthmus 1.2, protocol 8"),
        (
            {"model": "", "no_model": "/m: No such file"},
            "the model is not there: /m: No such file; it must lie at",
        ),
        ({"model": "abd"}, "another model lies at that path"),
        ({"no_folder": "/kv: cannot be written"}, "cache.folder: /kv: cannot be written"),
        ({"num_bytes": 1001 << 20}, "decode-0 on 10.0.0.1 need 1,001 MiB"),
        ({"address": "127.0.0.1"}, "127.0.0.1 is the address of one machine and 10.0.0.1 that of another"),
    ],
)
def test_what_differs_is_named(differs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartError) as caught:
        check_seats(HERE, [seat("prefill-0"), seat(**differs)], "10.0.0.1")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nodes_of_one_machine_share_its_memory() -> None:
    some = [seat(name, 600 << 20, address=address) for name, address in (("a", "m"), ("b", "n"))]
    check_seats(HERE, some, "10.0.0.1")
    with pytest.raises(StartError, match="a, c on m need 1,200 MiB"):
        check_seats(HERE, [*some, seat("c", 600 << 20, address="m")], "10.0.0.1")


def test_a_head_that_listens_on_loopback_is_reached_by_nobody_else() -> None:
    with pytest.raises(StartError, match=r"127.0.0.1 is the address of one machine"):
        check_seats(HERE, [seat()], "127.0.0.1")


def test_a_report_tells_models_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    (tmp_path / "README.md").write_text("no part of the model")
    asked = MachineQuestion(str(tmp_path), str(tmp_path / "kv"))
    first = report_of(asked, "m")
    assert (first.address, first.no_model, first.no_folder) == ("m", "", "")
    assert (tmp_path / "kv").is_dir()
    (tmp_path / "README.md").write_text("nor is this")
    assert report_of(asked, "m").model == first.model
    weights.write_bytes(bytes((3 << 20) - 1) + b"\1")
    assert report_of(asked, "m").model != first.model


def test_a_report_says_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = report_of(MachineQuestion(str(tmp_path / "none"), str(tmp_path / "file")), "m")
    assert found.no_model == f"{tmp_path / 'none'}: No such file or directory"
    assert found.no_folder == f"{tmp_path / 'file'}: File exists"
    assert report_of(MachineQuestion(str(tmp_path), None), "m").no_folder == ""


EAST = Machine("e", {"CPU": 8.0, "memory": 4 * GIB}, {"isthmus-cluster": "east"})
PLAIN = Machine("p", {"CPU": 4.0, "GPU": 1.0, "memory": 8 * GIB}, {})


def bundle(name: str, cluster: str = "", **resources: float) -> Bundle:
    return Bundle(name, cluster, resources)


@pytest.mark.parametrize(
    ("bundles", "alone", "said"),
    [
        ([bundle("a", CPU=8), bundle("b", CPU=4)], True, ""),
        ([bundle("a", CPU=4), bundle("b", CPU=4), bundle("c", CPU=4)], False, ""),
        (
            [bundle("a", "west", CPU=1)],
            False,
            "a needs a machine with the label isthmus-cluster=west, and none",
        ),
        (
            [bundle("a", "east", CPU=2, GPU=1)],
            False,
            "a needs 2 CPU, 1 GPU; the most that a machine with the label",
        ),
        ([bundle("a", CPU=9)], False, "a needs 9 CPU; the most that a machine has: 8 CPU"),
        (
            [bundle("a", memory=9 * GIB)],
            False,
            "a needs 9,216 MiB of memory; the most that a machine has: 8,192 MiB",
        ),
        (
            [bundle(name, CPU=1) for name in "abc"],
            True,
            "c needs 1 CPU, and ray.spread: strict gives each node",
        ),
        (
            [bundle(name, GPU=1) for name in "ab"],
            False,
            "b needs 1 GPU, and the other nodes take what there is",
        ),
    ],
)
def test_a_bundle_without_a_place_is_named(bundles: list[Bundle], alone: bool, said: str) -> None:
    found = unplaced(bundles, [EAST, PLAIN], alone=alone)
    assert found.startswith(said) and bool(found) == bool(said)


def test_no_machine_has_nothing() -> None:
    assert unplaced([bundle("a", CPU=1)], [], alone=False) == "a needs 1 CPU, and there is no machine"


@pytest.mark.parametrize(("num", "threads"), [(1, 3), (2, 3), (3, 1), (8, 1)])
def test_threads_are_shared_and_a_core_is_left_to_each(num: int, threads: int) -> None:
    assert fair_threads([EAST, PLAIN], num) == threads
