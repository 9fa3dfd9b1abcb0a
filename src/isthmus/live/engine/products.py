"""Chooses the fastest matrix product for each shape of weights and number of rows, by timing.

CPU flags do not tell: bfloat16 products run at half to four times the speed of float32, and the row count up to which
a skinny kernel pays differs by shape and threads. Forms are timed when a model is loaded, once a machine; choices are
kept beside the compiled kernels, by CPU, threads and torch version. Quantised weights are timed as they are and
widened, and the faster form is held.

Legend: T rows, N and K output and input width.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from isthmus.live.engine.tiles import Tiled, Weight, converted

log = logging.getLogger(__name__)

Form = Callable[[Tensor, Any, Tensor | None], Tensor]
"""x [T, K], weight [N, K] and perhaps bias [N] to x @ weight.T + bias [T, N]."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Row counts that are timed; products of other counts use the next one up, or the last."""
HEAD_ROWS = 64
"""Most rows that are timed for the head, which multiplies sampled rows only."""
LEAST_WEIGHTS = 1 << 18
"""Smaller matrices are not timed: their products take microseconds in any form."""
TRIALS, TRIAL_S, ENOUGH_S = 3, 0.002, 0.01
"""Trials of each form, of which the quickest counts; least seconds of a trial; seconds in all after which there is no
further trial."""
HOPELESS = 3.0
"""Forms that take this many times the best form's time are not tried again."""
SAMPLE_BYTES, WIDEST_BYTES = 64 << 20, 2
"""Bytes of weights that are timed in turn, more than caches hold, and bytes of a number at most."""

_Kept = dict[str, dict[str, list[str]]]
_Type = torch.dtype | str
_Key = tuple[torch.Size, _Type]
_T = TypeVar("_T")
_L = TypeVar("_L")
_H = TypeVar("_H")


class Products:
    """`forms`: by name, no name twice, for each type of weights, and those of them that round sums; `others`: the types
    in which weights of a type may be held instead. `fallback`: for shapes that were not timed. `path`: where choices
    are kept, under the name of the `machine`."""

    def __init__(
        self,
        forms: Mapping[_Type, Mapping[str, Form]],
        others: Mapping[_Type, Sequence[_Type]],
        rounding: Container[str],
        fallback: Form,
        path: Path,
        machine: str,
    ) -> None:
        self._forms, self._others, self._rounding = forms, others, rounding
        self._fallback, self._path = fallback, path
        self._machine = f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        self._chosen: dict[_Key, list[Form]] = {}
        self.names: dict[str, list[str]] = {}
        """Chosen forms of each shape, one for each of `ROWS`."""

    def __call__(self, x_TK: Tensor, weight_NK: Weight, bias_N: Tensor | None) -> Tensor:
        chosen = self._chosen.get((weight_NK.shape, weight_NK.dtype))
        if chosen is None:
            return self._fallback(x_TK, weight_NK, bias_N)
        return chosen[min(bisect_left(ROWS, len(x_TK)), len(ROWS) - 1)](x_TK, weight_NK, bias_N)

    def prepare(self, layers: list[_L], head: _H) -> _H:
        """Chooses for the matrices in these nested weights, from what is kept or by timing, and puts them into the type
        that is the fastest: layer by layer, in place, since both forms of all might be too much memory. For the head,
        which it returns, only among forms that round no sum: of two tokens that are nearly as likely the less likely
        one could win."""
        types = self._chosen_types(layers, head)

        def held(weight: Weight) -> Weight:
            return converted(weight, types.get((weight.shape, weight.dtype), weight.dtype))

        for at, layer in enumerate(layers):
            layers[at] = replaced(layer, held)
        return replaced(head, held)

    def _chosen_types(self, layers: list[_L], head: _H) -> dict[_Key, _Type]:
        last = {weight.shape for weight in matrices(head)}  # in whichever type: it may be held in another
        alike: dict[_Key, list[Weight]] = {}
        for weight in matrices((tuple(layers), head)):
            if weight.numel() >= LEAST_WEIGHTS and weight.dtype in self._forms:
                alike.setdefault((weight.shape, weight.dtype), []).append(weight)
        shapes = [self._alike(key, group, key[0] in last) for key, group in alike.items()]
        if not self._take(shapes):
            with _alone(self._path):  # processes that start together would time each other
                if not self._take(shapes):
                    self._time(shapes)
        return {shape.key: shape.type_of(self.names[shape.name]) for shape in shapes}

    def _alike(self, key: _Key, weights: list[Weight], is_head: bool) -> _Alike:
        def forms(dtype: _Type) -> dict[str, Form]:
            known = self._forms[dtype].items()
            return {name: form for name, form in known if not (is_head and name in self._rounding)}

        ways = {dtype: forms(dtype) for dtype in (key[1], *self._others.get(key[1], ()))}
        return _Alike(key, weights, ways, HEAD_ROWS if is_head else ROWS[-1])

    def _take(self, shapes: Sequence[_Alike]) -> bool:
        """Takes kept choices; whether all shapes have one now."""
        kept = self._read().get(self._machine, {})
        for shape in shapes:
            names = kept.get(shape.name, [])
            if len(names) == len(ROWS) and any(forms.keys() >= set(names) for forms in shape.ways.values()):
                self._choose(shape, names)
        return all(shape.name in self.names for shape in shapes)

    def _time(self, shapes: Sequence[_Alike]) -> None:
        timed = {shape.name: shape.fastest() for shape in shapes if shape.name not in self.names}
        self._keep(timed)
        for shape in shapes:
            self._choose(shape, timed.get(shape.name) or self.names[shape.name])
        log.info("products were timed: %s", "; ".join(described(*each) for each in timed.items()))

    def _choose(self, shape: _Alike, names: list[str]) -> None:
        dtype = shape.type_of(names)
        self.names[shape.name] = names
        self._chosen[shape.key[0], dtype] = [shape.ways[dtype][name] for name in names]

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError):
            return {}  # none yet, or none of ours: it is written anew

    def _keep(self, timed: dict[str, list[str]]) -> None:
        """Writes choices for the next start, atomically because other processes may read them."""
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


@dataclass(frozen=True)
class _Alike:
    """Weights of one shape and type, for products of up to `most` rows; `ways`: the types in which they may be held,
    with the forms for each."""

    key: _Key
    weights: Sequence[Weight]
    ways: Mapping[_Type, Mapping[str, Form]]
    most: int

    @property
    def name(self) -> str:
        (rows, width), dtype = self.key
        return f"{rows}x{width} {str(dtype).removeprefix('torch.')}"

    def type_of(self, names: Sequence[str]) -> _Type:
        return next(dtype for dtype, forms in self.ways.items() if names[0] in forms)

    def fastest(self) -> list[str]:
        """For each of `ROWS`. Weights can be held in one way only: the one that takes least in the mean of them all, as
        ratios."""
        timed = []
        for dtype, forms in self.ways.items():
            count = max(2, -(-SAMPLE_BYTES // (self.key[0].numel() * WIDEST_BYTES)))
            timed.append(_fastest(forms, [converted(each, dtype) for each in self.weights[:count]], self.most))
        best = min(timed, key=lambda way: sum(math.log(seconds) for _, seconds in way))
        return [name for name, _ in best]


def described(shape: str, names: list[str]) -> str:
    """As "576x1536 bfloat16: native to 2 rows, bfloat16 beyond"."""
    parts = [
        f"{name} to {rows}" for rows, name, after in zip(ROWS, names, names[1:], strict=False) if name != after
    ]
    return f"{shape}: {', '.join([*parts, names[-1] + (' beyond' if parts else '')])}"


def matrices(value: object) -> Iterator[Weight]:
    """Every matrix in nested dataclasses and tuples of weights."""
    if isinstance(value, Tiled) or (isinstance(value, Tensor) and value.dim() == 2):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from matrices(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from matrices(getattr(value, field.name))


def replaced(value: _T, change: Callable[[Weight], Weight]) -> _T:
    """Nested dataclasses and tuples of weights, with each matrix as `change` makes it."""
    if isinstance(value, Tiled) or (isinstance(value, Tensor) and value.dim() == 2):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(replaced(each, change) for each in value)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: replaced(getattr(value, each.name), change) for each in fields(value)}
        )
    return value


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; at once where nothing can be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.with_suffix(".lock").open("a")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fastest(forms: Mapping[str, Form], alike: Sequence[Weight], most: int) -> list[tuple[str, float]]:
    """The form for each of `ROWS`, and its seconds; beyond `most` as there."""
    found: list[tuple[str, float]] = []
    for rows in ROWS:
        if rows <= most:
            times = _times(forms, alike, rows)
            name = min(times, key=times.__getitem__)
            best = name, times[name]
        found.append(best)
    return found


def _times(forms: Mapping[str, Form], alike: Sequence[Weight], rows: int) -> dict[str, float]:
    """Seconds by weights of one shape in turn, as layers follow each other: few of them are in a cache. Without the
    forms that are hopeless."""
    x_TK = torch.linspace(-1, 1, rows * alike[0].shape[1]).view(rows, -1)
    times, spent, weights = dict.fromkeys(forms, math.inf), dict.fromkeys(forms, 0.0), cycle(alike)
    for _ in range(TRIALS):  # in turns: another process may take the core for a while
        for name in [name for name in times if spent[name] < ENOUGH_S]:
            count, seconds = _trial(forms[name], x_TK, weights)
            times[name] = min(times[name], seconds / count)
            spent[name] += seconds
        best = min(times.values())
        times = {name: seconds for name, seconds in times.items() if seconds < HOPELESS * best}
    return times


def _trial(form: Form, x_TK: Tensor, weights: Iterator[Weight]) -> tuple[int, float]:
    """How many products took how many seconds."""
    count, started = 0, time.perf_counter()
    while True:
        form(x_TK, next(weights), None)
        count += 1
        passed = time.perf_counter() - started
        if passed >= TRIAL_S:
            return count, passed
