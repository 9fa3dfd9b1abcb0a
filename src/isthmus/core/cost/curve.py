"""Cost from a measured or published curve.

    prefill  prefill_fixed_s + prefill_token_s * n + prefill_pair_s * n (n + 2 p)    n new tokens after p cached
    decode   decode_fixed_s + decode_sequence_s * B + decode_context_s * C          B sequences, C tokens in all
    mixed    max(prefill, base) + (decode - base)                                    base: decode of no sequence

A mixed iteration reads the weights once: they are the base of decode, hidden behind a longer prefill. Since n (n + 2p)
is (n + p)^2 - p^2, coefficients of a fit in whole lengths, such as Mooncake's a (N - p) + b (N^2 - p^2), are the same.

Tables may replace coefficients: `decode_points` of (batch, seconds at no context) the first two of decode,
`decode_context_points` of (batch, seconds per token of context) the third, `prefill_points` of (tokens, seconds of a
whole prompt) those of prefill. They are linear between points and constant below the first; beyond the last the second
is constant, the others follow the last segment. With `prefill_points` n tokens after p cached ones take
T(p + n) - T(p) + T(0).
"""

from __future__ import annotations

import difflib
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from isthmus.core.cost.elsewhere import SENT_BYTES, Queries
from isthmus.core.cost.transfer import UNKNOWN, Handling
from isthmus.core.errors import ConfigError

_PS = 1e12


class Curve(msgspec.Struct, frozen=True, tag=True):
    """Times in seconds, none negative. Raises ConfigError for a bad value.

    `origin`: source of the numbers; `error`: their mean relative error, None if not known; `measured_batch`,
    `measured_tokens`: the largest batch and context measured, 0 if not known; `query_elements`, `query_heads`: of a
    token's queries, all layers (0: queries count as many bytes as keys and values); `handling`: costs of moving KV.
    """

    kv_token_bytes: int
    num_layers: int
    prefill_token_s: float = 0.0
    prefill_fixed_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_fixed_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_context_s: float = 0.0
    decode_points: tuple[tuple[int, float], ...] = ()
    decode_context_points: tuple[tuple[int, float], ...] = ()
    state_bytes: int = 0
    origin: str = ""
    error: float | None = None
    measured_batch: int = 0
    measured_tokens: int = 0
    prefill_points: tuple[tuple[int, float], ...] = ()
    query_elements: int = 0
    query_heads: int = 0
    handling: Handling = UNKNOWN

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith(("_s", "_bytes")) and not 0 <= value < math.inf:
                raise ConfigError(f"cost curve: {name} is {value}; it must be a number, 0 or more")
        if self.num_layers < 1 or self.kv_token_bytes < 1:
            raise ConfigError("cost curve: num_layers and kv_token_bytes must be above 0")
        _check_table("prefill_points", self.prefill_points, "tokens")
        if len(self.prefill_points) == 1:
            raise ConfigError(
                "cost curve: prefill_points needs two points or more; a longer prompt takes longer"
            )
        if self.prefill_points and (self.prefill_fixed_s or self.prefill_token_s or self.prefill_pair_s):
            raise ConfigError(
                "cost curve: give prefill_points, or prefill_fixed_s, prefill_token_s and prefill_pair_s, not both"
            )
        _check_table("decode_points", self.decode_points)
        _check_table("decode_context_points", self.decode_context_points)
        if self.decode_points and (self.decode_fixed_s or self.decode_sequence_s):
            raise ConfigError(
                "cost curve: give decode_points, or decode_fixed_s with decode_sequence_s, not both"
            )
        if self.decode_context_points and self.decode_context_s:
            raise ConfigError("cost curve: give decode_context_points or decode_context_s, not both")

    def with_kv_work(self, *, leaves: bool, saved: bool) -> Curve:
        """The curve with the time that the engine waits for the handling of computed KV."""
        layer_s, byte_s = self.handling.computed_s(leaves=leaves, saved=saved)
        fixed_s, token_s = layer_s * self.num_layers, byte_s * self.kv_token_bytes
        if self.prefill_points:
            points = [(tokens, seconds + fixed_s + tokens * token_s) for tokens, seconds in self.prefill_points]
            return msgspec.structs.replace(self, prefill_points=tuple(points))
        return msgspec.structs.replace(
            self,
            prefill_fixed_s=self.prefill_fixed_s + fixed_s,
            prefill_token_s=self.prefill_token_s + token_s,
        )


def _check_table(name: str, points: Sequence[tuple[int, float]], what: str = "batch size") -> None:
    """Refuses a table in which more work is cheaper, on which other rooms rely."""
    sizes, values = [size for size, _ in points], [value for _, value in points]
    if sizes != sorted(set(sizes)) or values != sorted(values) or any(size < 1 for size in sizes):
        raise ConfigError(f"cost curve: {name} must rise in {what} (from 1) and never fall in seconds")
    if not all(0 <= value < math.inf for value in values):
        raise ConfigError(f"cost curve: {name} must hold seconds, 0 or more")


def _interpolated(points: Sequence[tuple[int, float]], at: float, *, beyond: bool) -> float:
    """Interpolates linearly, constant below the first point; `beyond`: follows the last segment, else constant."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    if at >= points[-1][0] and not beyond:
        return points[-1][1]
    after = min(bisect_right(points, at, key=lambda point: point[0]), len(points) - 1)
    (size, value), (next_size, next_value) = points[after - 1 : after + 1]
    return value + (next_value - value) * (at - size) / (next_size - size)


Work = Callable[[int, int], float]
"""(num_tokens, cached) -> picoseconds of a chunk, without the fixed time of an iteration."""


def _prefill(curve: Curve) -> tuple[float, Work]:
    """The fixed picoseconds of an iteration with prefill, and the function for each chunk."""
    if points := [(tokens, _PS * seconds) for tokens, seconds in curve.prefill_points]:

        def measured(num_tokens: int, cached: int) -> float:
            whole = _interpolated(points, cached + num_tokens, beyond=True)
            return whole - _interpolated(points, cached, beyond=True)

        return points[0][1], measured
    token, pair = _PS * curve.prefill_token_s, _PS * curve.prefill_pair_s

    def fitted(num_tokens: int, cached: int) -> float:
        return num_tokens * (token + pair * (num_tokens + 2 * cached))

    return _PS * curve.prefill_fixed_s, fitted


class CurveCost:
    """A `Curve` in picoseconds. Immutable but for a memo of batch sizes."""

    __slots__ = (
        "_base", "_curve", "_fixed", "_memo", "_work", "handling", "kv_token_bytes", "num_layers", "queries",
        "state_bytes",
    )  # fmt: skip

    def __init__(self, curve: Curve) -> None:
        self.kv_token_bytes: int = curve.kv_token_bytes
        self.state_bytes: int = curve.state_bytes
        self.num_layers: int = curve.num_layers
        self.handling: Handling = curve.handling
        elements = curve.query_elements or -(-curve.kv_token_bytes // SENT_BYTES)
        self.queries = Queries(elements, curve.query_heads, curve.num_layers)
        self._curve = curve
        self._fixed, self._work = _prefill(curve)
        self._base = round(_PS * (curve.decode_points[0][1] if curve.decode_points else curve.decode_fixed_s))
        self._memo: dict[int, tuple[int, int]] = {}

    def prefill_ns(self, num_tokens: int, cached: int) -> int:
        """One prompt alone, in one go: `num_tokens` after `cached` ones."""
        if not num_tokens:
            return 0
        return round(self._fixed + self._work(num_tokens, cached)) // 1000

    def decode_step_ps(self, num_decodes: int) -> tuple[int, int]:
        """(fixed, per token of context): with contexts that sum to C an iteration takes fixed + per * C."""
        found = self._memo.get(num_decodes)
        if found is None:
            found = self._memo[num_decodes] = self._decode(num_decodes) if num_decodes else (0, 0)
        return found

    def _decode(self, num_decodes: int) -> tuple[int, int]:
        curve = self._curve
        fixed_s = curve.decode_fixed_s + curve.decode_sequence_s * num_decodes
        context_s = curve.decode_context_s
        if curve.decode_points:
            fixed_s = _interpolated(curve.decode_points, num_decodes, beyond=True)
        if curve.decode_context_points:
            context_s = _interpolated(curve.decode_context_points, num_decodes, beyond=False)
        return round(_PS * fixed_s), round(_PS * context_s)

    def step_ps(self, chunks: Sequence[tuple[int, int]], num_decodes: int, context: int) -> int:
        """One iteration: prefill chunks `(num_tokens, cached)` and decodes whose contexts sum to `context`."""
        fixed, per = self.decode_step_ps(num_decodes)
        decode = fixed + per * context
        if not chunks:
            return decode
        prefill = self._fixed
        for num_tokens, cached in chunks:
            prefill += self._work(num_tokens, cached)
        if not num_decodes:
            return round(prefill)
        return decode - self._base + max(round(prefill), self._base)

    def attend_ps(self, num_queries: int, num_tokens: float) -> float:
        """Time that `num_tokens` of context add to an iteration of decodes, or of a prompt behind them."""
        read = self.decode_step_ps(1)[1] * num_tokens
        if num_queries == 1:
            return read
        tokens = round(num_tokens)
        return max(read, self._work(num_queries, tokens) - self._work(num_queries, 0))


def curve_of(mapping: Mapping[str, Any]) -> Curve:
    """A curve from a parsed YAML or JSON file. Raises ConfigError naming an unknown key and the nearest one."""
    fields = Curve.__struct_fields__
    for key in mapping:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(fields)}"
            raise ConfigError(f"cost curve: unknown key {key!r}; {hint}")
    if "prefill_token_s" not in mapping and "prefill_points" not in mapping:
        raise ConfigError("cost curve: what prefill takes is missing; give prefill_token_s or prefill_points")
    try:
        return msgspec.convert({"type": "Curve", **mapping}, Curve, strict=False)  # numbers may have quotes
    except msgspec.ValidationError as error:
        raise ConfigError(f"cost curve: {error}") from None


def to_mapping(curve: Curve) -> dict[str, Any]:
    """The mapping that `curve_of` reads, of plain values for YAML or JSON."""
    mapping: dict[str, Any] = msgspec.to_builtins(curve)
    del mapping["type"]
    return mapping
