"""Fields of a `config.json`: what is missing, of the wrong kind or not supported is refused by name. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from isthmus.engine.shapes import RopeSpec
from isthmus.errors import ModelError

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_TYPES = tuple(_ROPE_FIELDS)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: not found; a model folder needs this file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return value


class Fields:
    """Reads one object of a config file. A null field counts as absent. Every reader raises ModelError."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def states(self, name: str, default: bool) -> bool:
        """Whether a field has a value; `default` where the file does not name it at all. Only for fields whose null
        says something."""
        return self._values[name] is not None if name in self._values else default

    def nested(self, name: str) -> Fields:
        """The fields of an object, none when absent."""
        return Fields(self.path, self.object(name))

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: {reason}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; required without a default."""
        value = self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(f"{name!r} must be a whole number above {least - 1}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; required without a default."""
        value = self._default(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(f"{name!r} must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._default(name, default)
        if not isinstance(value, bool):
            self.refuse(f"{name!r} must be true or false, not {value!r}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object, empty when absent."""
        value = self._default(name, {})
        if not isinstance(value, dict):
            self.refuse(f"{name!r} must be an object, not {value!r}")
        return value

    def words(self, name: str, count: int, allowed: tuple[str, ...]) -> list[str] | None:
        """One word of `allowed` for each of `count` layers; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(word in allowed for word in value):
            self.refuse(
                f"{name!r} must give one of {', '.join(allowed)} for each of {count} layers, not {value!r}"
            )
        return value

    def layer_numbers(self, name: str, first: int, last: int) -> list[int]:
        """Numbers of layers, from `first` to `last`; empty when absent."""
        value = self._default(name, [])
        if not isinstance(value, list) or not all(type(at) is int and first <= at <= last for at in value):
            self.refuse(f"{name!r} must list numbers of layers from {first} to {last}, not {value!r}")
        return value

    def only(self, name: str, supported: Any) -> None:
        """A field that may be absent or have one value."""
        value = self.get(name)
        if value is not None and value != supported:
            self.refuse(f"{name} {value!r} is not supported; supported: {supported!r}")

    def dtype(self) -> str:
        dtype = str(self.get("dtype") or self.get("torch_dtype") or "float32")
        if dtype == "float16":
            return "bfloat16"
        if dtype not in ("float32", "bfloat16"):
            self.refuse(f"dtype {dtype} is not supported; supported: float32, bfloat16, float16")
        return dtype

    def rope(self, dim: int, max_length: int) -> RopeSpec:
        """Reads both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`.

        `dim`: of what is rotated; the share `partial_rotary_factor` of a head is the caller's to read.
        """
        options = dict(self.object("rope_parameters") or self.object("rope_scaling"))
        if any(isinstance(value, dict) for value in options.values()):
            self.refuse("rope_parameters by layer type are not supported")
        kind = options.pop("rope_type", None) or options.pop("type", None) or "default"
        options.pop("type", None)
        options.pop("partial_rotary_factor", None)
        theta = options.pop("rope_theta", None) or self.number("rope_theta", 10_000.0)
        if kind not in ROPE_TYPES:
            self.refuse(f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if not options.get("original_max_position_embeddings"):
            options["original_max_position_embeddings"] = (
                self.get("original_max_position_embeddings") or max_length
            )
        for name in _ROPE_FIELDS[kind]:
            if not isinstance(options.get(name), int | float):
                self.refuse(f"RoPE type {kind!r} needs a number in the field {name!r}")
        return RopeSpec(dim=dim, theta=float(theta), kind=kind, options=options)

    def rotary_share(self, default: float) -> float:
        """`partial_rotary_factor`, wherever it stands: the share of each head that is rotated."""
        nested = self.object("rope_parameters") or self.object("rope_scaling")
        value = nested.get("partial_rotary_factor")
        value = self._default("partial_rotary_factor", default) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            self.refuse(f"'partial_rotary_factor' must be above 0 and at most 1, not {value!r}")
        return float(value)

    def _default(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None and default is None:
            self.refuse(f"the field {name!r} is missing")
        return default if value is None else value
