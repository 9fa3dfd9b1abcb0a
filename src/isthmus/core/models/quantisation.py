"""The quantisation of a model's matrices, as its `config.json` says. Unknown schemes are refused.

Fields about activations and KV (`input_scale`, `k_scale`) are not read, since the engine computes both in its own
types; nor are lists of exceptions (`ignore`, `modules_to_not_convert`): an unquantised tensor is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from isthmus.core.models.fields import Fields

T = TypeVar("T")
Block = tuple[int, int]
"""Rows and columns."""


class Scaled(msgspec.Struct, frozen=True, tag="scaled"):
    """Floats of 8 bits, with a scale for the matrix, for each row, or for each `block` if it has a size."""

    block: Block | None


class Compressed(msgspec.Struct, frozen=True, tag="compressed"):
    """Weights of compressed-tensors: scaled floats or integers of 8 bits, or integers of these `bits` packed in words.
    `groups`: sizes of groups of columns with a scale of their own. `symmetric`: some matrices may have no zero
    points."""

    block: Block | None
    groups: tuple[int, ...]
    bits: tuple[int, ...]
    symmetric: bool


class Gptq(msgspec.Struct, frozen=True, tag="gptq"):
    """Words along the columns of a matrix, and groups of `group_size` columns, 0 for a single one. `ordered`: each
    column's group is stored; else groups follow each other. `lowered`: zero points are stored less one."""

    bits: int
    group_size: int
    ordered: bool
    lowered: bool


class Awq(msgspec.Struct, frozen=True, tag="awq"):
    """Words of 8 numbers along the rows of a matrix, and groups of `group_size` columns, 0 for a single one."""

    group_size: int


Quantisation = Scaled | Compressed | Gptq | Awq


def read_quantisation(fields: Fields) -> Quantisation | None:
    """Quantisation of a whole `config.json`, None without any. Raises ModelError naming what is not supported."""
    name = "compression_config" if fields.object("compression_config") else "quantization_config"
    own = fields.nested(name)
    if not fields.object(name):
        return None
    method = str(own.get("quant_method") or "unknown")
    if method not in _READERS:
        fields.refuse(f"{method} quantised weights are not supported; supported: {', '.join(_READERS)}")
    return _READERS[method](own)


def _fp8(fields: Fields) -> Quantisation:
    fields.only("fmt", "e4m3")
    fields.only("expert_dtype", "fp8")
    return Scaled(_block(fields, "weight_block_size"))


def _fbgemm(fields: Fields) -> Quantisation:
    return Scaled(None)


def _gptq(fields: Fields) -> Quantisation:
    fields.only("is_marlin_format", False)
    kind = _one_of(
        fields, str(fields.get("checkpoint_format") or fields.get("format") or "gptq"), "format", _GPTQ
    )
    bits = _one_of(fields, fields.count("bits"), "bits", _BITS)
    return Gptq(bits, _group_size(fields), fields.flag("desc_act", False), lowered=kind == "gptq")


def _awq(fields: Fields) -> Quantisation:
    kind = fields.get("version") or fields.get("format") or fields.get("checkpoint_format") or "gemm"
    _one_of(fields, str(kind).lower(), "version", ("gemm",))
    fields.only("bits", 4)
    fields.only("zero_point", True)
    return Awq(_group_size(fields))


def _compressed(fields: Fields) -> Quantisation:
    """The schemes of all groups together: each matrix's tensors tell which it has, but for the size of blocks."""
    if fields.nested("sparsity_config").get("format") not in (None, "dense"):
        fields.refuse("sparse weights of compressed-tensors are not supported")
    if fields.object("transform_config"):
        fields.refuse("transformed weights of compressed-tensors (transform_config) are not supported")
    schemes = [_scheme(fields, each) for each in _groups(fields)]
    blocks = {_block(each, "block_structure") for each in schemes if each.get("strategy") == "block"} - {None}
    if len(blocks) > 1:
        fields.refuse("blocks of several sizes (config_groups) are not supported")
    return Compressed(
        block=next(iter(blocks), None),
        groups=tuple(sorted({each.count("group_size") for each in schemes if each.get("group_size")})),
        bits=tuple(
            sorted({each.count("num_bits", 8) for each in schemes if (each.get("type") or "int") == "int"})
        ),
        symmetric=any(each.flag("symmetric", True) for each in schemes),
    )


def _groups(fields: Fields) -> list[Fields]:
    """The groups that quantise weights."""
    groups = fields.nested("config_groups")
    found = [groups.nested(name) for name in fields.object("config_groups")]
    found = [each for each in found if each.object("weights")]
    if not found:
        fields.refuse("config_groups must say how weights are quantised")
    return found


def _scheme(fields: Fields, group: Fields) -> Fields:
    """The checked scheme of a group's weights."""
    kind = _one_of(fields, str(group.get("format") or fields.get("format")), "format", tuple(_FORMATS))
    weights = group.nested("weights")
    stated = (weights.get("type") or "int", weights.count("num_bits", 8))
    if stated not in _FORMATS[kind]:
        known = " or ".join(f"{bits} ({name})" for name, bits in _FORMATS[kind])
        fields.refuse(f"{kind} weights must be of {known} bits, not {stated[1]} ({stated[0]})")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    _one_of(fields, str(strategy), "strategy", ("tensor", "channel", "group", "block"))
    return weights


_BITS = (4, 8)
_GPTQ = ("gptq", "gptq_v2")
_FORMATS = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
}
"""Formats of compressed-tensors, with types and bits."""
_READERS: dict[str, Callable[[Fields], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}


def _one_of(fields: Fields, value: T, name: str, known: tuple[T, ...]) -> T:
    if value not in known:
        fields.refuse(
            f"quantisation {name} {value!r} is not supported; supported: {', '.join(map(str, known))}"
        )
    return value


def _group_size(fields: Fields) -> int:
    return 0 if fields.get("group_size") == -1 else fields.count("group_size")


def _block(fields: Fields, name: str) -> Block | None:
    value = fields.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        fields.refuse(f"{name!r} must be two whole numbers above 0, not {value!r}")
    return value[0], value[1]
