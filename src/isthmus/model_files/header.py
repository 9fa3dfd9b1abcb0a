"""The header of a GGUF file: its metadata, and where its tensors lie. A model may be split into several files: they
are read as one, whichever of them is named.

The format: ggml's docs/gguf.md, versions 2 and 3, little-endian. The gguf library reads the same, but makes several
arrays of every token and merge: seconds for a vocabulary, in every process of a cluster.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from isthmus.core.errors import ModelError
from isthmus.core.models import Fields


class TensorKind(NamedTuple):
    """A type of tensors: a block of so many numbers takes so many bytes."""

    name: str
    numbers: int
    bytes: int


class TensorInfo(NamedTuple):
    """`shape`: the slowest dimension first. `start`: in bytes from that of the file `path`."""

    kind: TensorKind
    shape: tuple[int, ...]
    start: int
    path: Path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.kind.numbers * self.kind.bytes


class Header(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


KINDS = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    30: TensorKind("BF16", 1, 2),
}
"""By ggml's number."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def whole_name(path: Path) -> str:
    """A model's name by that of its file, or of any of its parts."""
    part = _PART.fullmatch(path.name)
    return part[1] if part else path.stem


def parts_of(path: Path) -> list[Path]:
    """All files of a split model, by the name of one of them; else the file itself."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return [path]
    return [path.with_name(f"{part[1]}-{at:05}-of-{part[3]}.gguf") for at in range(1, int(part[3]) + 1)] or [
        path
    ]


def read_header(path: Path) -> Header:
    """Reads the header of a file, or of all parts of a split model with the first one's metadata.

    Raises ModelError for what is no whole GGUF file, or has a tensor of a type that is not in KINDS, and for parts that
    are missing or belong to different models.
    """
    try:
        return _read(path, tuple((part.stat().st_mtime_ns, part.stat().st_size) for part in _there(path)))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as GGUF: {error}") from None


def _there(path: Path) -> list[Path]:
    return [part for part in parts_of(path) if part.exists()]


@lru_cache(maxsize=2)
def _read(path: Path, _stamps: tuple[tuple[int, int], ...]) -> Header:
    """Read once as long as the files are the same."""
    header = _read_one(path)
    count = _count(path, header)
    if count < 2:
        return header
    paths = parts_of(path)
    if len(paths) != count:
        raise ModelError(
            f"{path}: is one of {count} files, which must be named NAME-00001-of-{count:05}.gguf and on"
        )
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ModelError(f"{path}: is one of {count} files; missing: {', '.join(missing[:5])}")
    return _joined([(part, header if part == path else _read_one(part)) for part in paths])


def _joined(parts: list[tuple[Path, Header]]) -> Header:
    tensors: dict[str, TensorInfo] = {}
    for at, (path, header) in enumerate(parts):
        if _count(path, header) != len(parts) or header.metadata.get("split.no") != at:
            raise ModelError(f"{path}: does not say that it is part {at + 1} of {len(parts)}")
        if twice := tensors.keys() & header.tensors.keys():
            raise ModelError(f"{path}: has the tensor {min(twice)}, which another part has, too")
        tensors |= header.tensors
    path, first = parts[0]
    if first.metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        stated = first.metadata["split.tensors.count"]
        raise ModelError(
            f"{path}: {stated} tensors are stated, and {len(tensors)} are in its {len(parts)} parts"
        )
    return Header(first.metadata, tensors)


def _count(path: Path, header: Header) -> int:
    return Fields(str(path), header.metadata).count("split.count", 0, least=0)


def _read_one(path: Path) -> Header:
    if not path.stat().st_size:  # cannot be mapped
        raise ModelError(f"{path}: is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).header()


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> Header:
        if self._data[:4] != b"GGUF":
            self._refuse("is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if not version & 0xFFFF:
            self._refuse("is big-endian; supported: GGUF of versions 2 and 3, little-endian")
        if version not in (2, 3):
            self._refuse(f"is of GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_keys)}
        fields = Fields(str(self._path), metadata)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.count("general.alignment", _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        return Header(metadata, {name: self._placed(name, info, start) for name, info in found})

    def _tensor(self) -> tuple[str, TensorInfo]:
        name, num_dimensions = self._string(), self._number("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"{name} has {num_dimensions} dimensions; GGUF has 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("Q") for _ in range(num_dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        if number not in KINDS:
            known = ", ".join(kind.name for kind in KINDS.values())
            self._refuse(f"{name} is of type {_type_name(number)}, which is not supported; supported: {known}")
        return name, TensorInfo(KINDS[number], shape, offset, self._path)

    def _placed(self, name: str, info: TensorInfo, start: int) -> TensorInfo:
        """Its offset counts from the start of all tensors."""
        info = info._replace(start=start + info.start)
        if info.shape[-1] % info.kind.numbers:
            self._refuse(f"{name} has rows of {info.shape[-1]} numbers, which {info.kind.name} cannot hold")
        if info.start + info.num_bytes > len(self._data):
            missing = info.start + info.num_bytes - len(self._data)
            self._refuse(f"is truncated: {missing} bytes of the tensor {name} are missing")
        return info

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._number(self._code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        """Numbers or strings; nobody writes arrays of arrays."""
        if kind != _STRING:
            return list(self._numbers(self._code(kind), count))
        if count > (len(self._data) - self._at) // 8:
            self._ends()
        data, at, found = self._data, self._at, []
        for _ in range(count):
            stop = at + 8 + int.from_bytes(data[at : at + 8], "little")
            found.append(data[at + 8 : stop].decode())
            at = stop
        self._at = at
        self._check(0)
        return found

    def _string(self) -> str:
        length = self._number("Q")
        self._check(length)
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(code) * count
        self._check(size)
        self._at += size
        return struct.unpack_from(f"<{count}{code}", self._data, self._at - size)

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            self._refuse(f"has metadata of type {kind}, which is not known")
        return _NUMBERS[kind]

    def _check(self, size: int) -> None:
        """Whether so many bytes are left."""
        if self._at + size > len(self._data):
            self._ends()

    def _ends(self) -> NoReturn:
        self._refuse("is truncated: it ends in its header")

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self._path}: {reason}")


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    return next((kind.name for kind in GGMLQuantizationType if kind == number), str(number))
