"""What work costs on a node, and what it runs on: curves, hardware and the model's own facts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.config import Config, RoleConfig
from isthmus.core.cost import (
    HARDWARE,
    Analytic,
    Cost,
    Hardware,
    curve_of,
    engine_coefficients,
    facts_of,
    hardware_named,
)
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler import CPU_TILE, TILE, Chunking
from isthmus.model_files import open_files
from isthmus.yaml_file import read_document

PROFILES = Path(__file__).parent.parent / "core" / "cost" / "profiles"
"""Published measurements that `engine.cost` may name."""
_COST_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
_CODEC_DTYPES = {cost: codec for codec, cost in _COST_DTYPES.items()}


def hardware_of(config: Config, nodes: RoleConfig) -> Hardware | None:
    """What nodes of a role run on, if the configuration says. Raises ConfigError for an unknown name."""
    name = nodes.hardware or config.engine.hardware
    return None if name is None else hardware_named(name)


def chunking_of(config: Config, nodes: RoleConfig) -> Chunking:
    """How nodes of a role cut prompts."""
    scheduling, hardware = config.scheduling, hardware_of(config, nodes)
    on_gpu = hardware is not None and hardware.name != "cpu"
    return Chunking(
        scheduling.partial_prefills,
        config.slo.tbt_ms if scheduling.chunking == "tbt" else None,
        TILE if on_gpu else CPU_TILE,
    )


def gpus_of(config: Config, nodes: RoleConfig) -> int:
    return nodes.gpus or config.engine.gpus


def codec_dtype(cost: Cost, otherwise: str = "") -> str:
    """Of the KV that a cost model speaks of, as codecs name it; "" for what they do not take."""
    return _CODEC_DTYPES.get(cost.kv_dtype, "") if isinstance(cost, Analytic) else otherwise


def cost_of(config: Config, nodes: RoleConfig, model: Path | None) -> Cost:
    """What work takes on a node of a role: a measured curve where there is one, else the analytic model of the
    model's config.json (`model`: its folder, that file, or a GGUF file) on its hardware, this CPU when none is named.

    Raises ConfigError for a curve or hardware without a cost, and for the emulated engine without hardware; ModelError
    for a model without a cost.
    """
    engine = config.engine
    if engine.cost is not None:
        return curve_of(_curve_values(engine.cost))
    if engine.kind == "emulated" and hardware_of(config, nodes) is None:
        raise ConfigError(
            "the emulated engine needs engine.hardware (--hardware), e.g. h200, or a curve in engine.cost; "
            f"hardware: {', '.join(HARDWARE)}"
        )
    if model is None:
        raise ConfigError("engine.cost or model: give one; without it nobody knows what work costs")
    hardware = hardware_of(config, nodes) or hardware_named("cpu")
    facts = facts_of(*_described(model))
    weight_dtype = _COST_DTYPES[engine.dtype] if engine.dtype else facts.weight_dtype
    kv_dtype = "fp32" if weight_dtype == "fp32" else "bf16"
    dtypes = {"weight_dtype": weight_dtype, "kv_dtype": kv_dtype}
    coefficients = engine_coefficients("vllm", hardware, **dtypes)
    return Analytic(
        model=facts, hardware=hardware, coefficients=coefficients, num_gpus=gpus_of(config, nodes), **dtypes
    )


def _described(model: Path) -> tuple[Mapping[str, Any], str]:
    """The config.json of a model, and how messages name it."""
    if not model.is_dir() and model.suffix != ".gguf":
        return read_document(model).values, str(model)
    files = open_files(model)
    return files.required_object("config.json"), files.where("config.json")


def is_shipped(name: str) -> bool:
    """Whether a published profile has this name."""
    return (PROFILES / f"{name}.yaml").is_file()


def _curve_values(given: str | dict[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str):
        path = PROFILES / f"{given}.yaml" if is_shipped(given) else Path(given).expanduser()
        if not path.exists():
            names = sorted(each.stem for each in PROFILES.glob("*.yaml"))
            near = difflib.get_close_matches(path.name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: cannot be read: no such file, and no published profile{hint}")
        given = read_document(path).values
    return {key: value for key, value in given.items() if not str(key).startswith("x-")}
