"""Fields of a `config.json`; a missing or wrong one is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from isthmus.core.errors import ModelError
from isthmus.core.models.spec import RopeSpec

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": (),
}
ROPE_TYPES = tuple(_ROPE_FIELDS)


class Fields:
    """Reads one object of a config file. A null field counts as absent. Every reader raises ModelError.

    `where`: name of the file in messages. `architecture`: the one of the file's as which it is read.
    """

    def __init__(self, where: str, values: Mapping[str, Any], architecture: str = "") -> None:
        self.where, self.architecture, self._values = where, architecture, values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def states(self, name: str, default: bool) -> bool:
        """Whether a field is not null; `default` where it is absent. For fields whose null has a meaning."""
        return self._values[name] is not None if name in self._values else default

    def nested(self, name: str) -> Fields:
        """The fields of an object, none if it is absent."""
        return Fields(self.where, self.object(name), self.architecture)

    def of_text(self, architecture: str) -> Fields:
        """The language model's fields, which multimodal files keep apart."""
        return Fields(self.where, {**self._values, **self.object("text_config")}, architecture)

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.where}: {reason}")

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

    def each_layer(self, name: str, count: int, allowed: Sequence[Any]) -> list[Any] | None:
        """One of `allowed` for each of `count` layers; None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(each in allowed for each in value):
            names = ", ".join(map(str, allowed))
            self.refuse(f"{name!r} must give one of {names} for each of {count} layers, not {value!r}")
        return value

    def layer_numbers(self, name: str, first: int, last: int) -> list[int]:
        """Numbers of layers, from `first` to `last`; empty when absent."""
        value = self._default(name, [])
        if not isinstance(value, list) or not all(type(at) is int and first <= at <= last for at in value):
            self.refuse(f"{name!r} must list numbers of layers from {first} to {last}, not {value!r}")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Refuses any value of a field but the supported one."""
        value = self.get(name)
        if value is not None and value != supported:
            self.refuse(f"{name} {value!r} is not supported; supported: {supported!r}")

    def architectures(self) -> list[str]:
        """Names of the file's model classes, else its `model_type`."""
        names = self.get("architectures") or [str(self.get("model_type"))]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.refuse(f"'architectures' must be a list of names, not {names!r}")
        return names

    def max_length(self, default: int) -> int:
        """Tokens that the model can read, also under Kimi Linear's name."""
        return self.count("max_position_embeddings", self.count("model_max_length", default))

    def dtype(self, default: str) -> str:
        """Type of the weights, in both spellings."""
        return str(self.get("dtype") or self.get("torch_dtype") or default)

    def rope(self, dim: int, max_length: int) -> RopeSpec:
        """Rotary embedding of `dim` numbers a head, in both spellings: `rope_parameters`, and the older `rope_theta`
        with `rope_scaling`. A type in ROPE_TYPES has all its numbers."""
        options = dict(self.object("rope_parameters") or self.object("rope_scaling"))
        if any(isinstance(value, dict) for value in options.values()):
            self.refuse("rope_parameters by layer type are not supported")
        kind = str(options.pop("rope_type", None) or options.pop("type", None) or "default")
        options.pop("type", None)
        options.pop("partial_rotary_factor", None)
        theta = Fields(self.where, options).number("rope_theta", self.number("rope_theta", 10_000.0))
        options.pop("rope_theta", None)
        if not options.get("original_max_position_embeddings"):
            options["original_max_position_embeddings"] = (
                self.get("original_max_position_embeddings") or max_length
            )
        for name in _ROPE_FIELDS.get(kind, ()):
            if not isinstance(options.get(name), int | float):
                self.refuse(f"RoPE type {kind!r} needs a number in the field {name!r}")
        if kind == "factors" and len(options.get("factors") or ()) != dim // 2:
            self.refuse(f"RoPE type 'factors' needs one for each of {dim // 2} frequencies")
        return RopeSpec(dim=dim, theta=theta, kind=kind, options=options)

    def rotary_share(self, default: float) -> float:
        """`partial_rotary_factor`, in either place: the rotated share of each head."""
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
