"""Which product is the fastest here, for each shape of weights and number of rows.

No flag of a CPU tells: one multiplies bfloat16 at half the speed of float32 and another at four times it, and where a
skinny kernel stops to pay differs by shape and by threads. So the forms are timed when a model is loaded, once a
machine: the choice is kept beside the compiled kernels, by CPU, threads and version of torch.

Legend: T rows, N and K output and input width.
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import cycle
from pathlib import Path

import msgspec
import torch
from torch import Tensor

log = logging.getLogger(__name__)

Form = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, K], weight [N, K] and perhaps bias [N] to x @ weight.T + bias [T, N]."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Products of up to so many rows are timed with so many; those of more as the last."""
LEAST_WEIGHTS = 1 << 18
"""Products with fewer take microseconds in any form, less than the noise of a clock."""
TRIALS, TRIAL_S = 3, 0.002
"""Of each form the quickest of so many trials counts; a trial goes on for so long at least."""
HOPELESS = 3.0
"""A form that takes so many times as long as the best is not tried again."""

_Kept = dict[str, dict[str, list[str]]]


class Products:
    """`forms`: by name, for each type of weights; `fallback`: for shapes that were not timed. `path`: where choices are
    kept, under the name of the `machine`."""

    def __init__(
        self, forms: Mapping[torch.dtype, Mapping[str, Form]], fallback: Form, path: Path, machine: str
    ) -> None:
        self._forms, self._fallback, self._path = forms, fallback, path
        self._machine = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        self._chosen: dict[tuple[torch.Size, torch.dtype], list[Form]] = {}
        self.names: dict[str, list[str]] = {}
        """Of each shape in use, the form for each of `ROWS`."""

    def __call__(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        chosen = self._chosen.get((weight_NK.shape, weight_NK.dtype))
        if chosen is None:
            return self._fallback(x_TK, weight_NK, bias_N)
        return chosen[min(bisect_left(ROWS, len(x_TK)), len(ROWS) - 1)](x_TK, weight_NK, bias_N)

    def prepare(self, weights: Iterable[Tensor]) -> None:
        """Chooses for these, from what is kept or by timing."""
        kept = self._read().get(self._machine, {})
        timed: dict[str, list[str]] = {}
        alike: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        for weight in weights:
            if weight.numel() >= LEAST_WEIGHTS and weight.dtype in self._forms:
                alike.setdefault((weight.shape, weight.dtype), []).append(weight)
        for key, group in alike.items():
            name, forms = _name(group[0]), self._forms[group[0].dtype]
            names = kept.get(name, [])
            if len(names) != len(ROWS) or not forms.keys() >= set(names):
                names = timed[name] = [_fastest(forms, group, rows) for rows in ROWS]
            self.names[name] = names
            self._chosen[key] = [forms[each] for each in names]
        if timed:
            self._keep(timed)
            log.info("products were timed: %s", "; ".join(described(name, timed[name]) for name in timed))

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError):
            return {}  # none yet, or none of ours: it is written anew

    def _keep(self, timed: dict[str, list[str]]) -> None:
        """In one step: others may read, or start beside this process and know other shapes."""
        kept = self._read()
        kept.setdefault(self._machine, {}).update(timed)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
            temporary.replace(self._path)
        except OSError as error:
            log.warning(
                "%s: which products are the fastest is not kept for the next start: %s", self._path, error
            )


def described(shape: str, names: list[str]) -> str:
    """As "576x1536 bfloat16: native to 2 rows, bfloat16 beyond"."""
    parts = [
        f"{name} to {rows}" for rows, name, after in zip(ROWS, names, names[1:], strict=False) if name != after
    ]
    return f"{shape}: {', '.join([*parts, names[-1] + (' beyond' if parts else '')])}"


def matrices(value: object) -> Iterator[Tensor]:
    """Every matrix in nested dataclasses and tuples of weights."""
    if isinstance(value, Tensor):
        if value.dim() == 2:
            yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from matrices(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from matrices(getattr(value, each.name))


def _name(weight_NK: Tensor) -> str:
    rows, width = weight_NK.shape
    return f"{rows}x{width} {str(weight_NK.dtype).removeprefix('torch.')}"


def _fastest(forms: Mapping[str, Form], alike: Sequence[Tensor], rows: int) -> str:
    """By weights of one shape in turn, as layers follow each other: few of them are in a cache."""
    x_TK = torch.linspace(-1, 1, rows * alike[0].shape[1]).view(rows, -1)
    times, weights = dict.fromkeys(forms, float("inf")), cycle(alike)
    for _ in range(TRIALS):  # in turns: another process may take the core for a while
        for name in list(times):
            times[name] = min(times[name], _seconds(forms[name], x_TK, weights))
        best = min(times.values())
        times = {name: seconds for name, seconds in times.items() if seconds < HOPELESS * best}
    return min(times, key=times.__getitem__)


def _seconds(form: Form, x_TK: Tensor, weights: Iterator[Tensor]) -> float:
    """Of one product."""
    count, started = 0, time.perf_counter()
    while True:
        form(x_TK, next(weights), None)
        count += 1
        passed = time.perf_counter() - started
        if passed >= TRIAL_S:
            return passed / count
