"""Which files of a folder hold the model's weights."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from isthmus.core.errors import ModelError
from isthmus.model_files.base import ModelFiles

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_SHOWN = 5


class WeightFiles(NamedTuple):
    """`names`: of the files to read, in the folder. `source`: the file that decides: the weights themselves, or their
    index. `left`: names of weights that lie beside them and are not read."""

    names: tuple[str, ...]
    source: str
    left: tuple[str, ...]

    @property
    def note(self) -> str:
        """What somebody who put the files there may not expect; empty where nothing was to be chosen."""
        if not self.left and self.source in (WHOLE, INDEX):
            return ""
        more = ", ..." if len(self.left) > _SHOWN else ""
        left = f"; not read: {', '.join(self.left[:_SHOWN])}{more}" if self.left else ""
        return f"weights are read from {self.source}{left}"


def weight_files(files: ModelFiles) -> WeightFiles:
    """As transformers chooses: the file that config.json names, else model.safetensors, else those of its index. A
    single file of another name is taken, too, if it is no shard or adapter.

    Raises ModelError where nothing says which file it is, and for an index that names files outside the folder.
    """
    present = sorted(path.name for path in files.path.glob("*.safetensors"))
    source = _source(files, present)
    names = _listed(files, source) if source.endswith(".json") else (source,)
    indexes = sorted(path.name for path in files.path.glob("*.safetensors.index.json"))
    return WeightFiles(names, source, tuple(n for n in (*present, *indexes) if n not in (*names, source)))


def _source(files: ModelFiles, present: list[str]) -> str:
    where = files.where("config.json")
    if (named := files.object("config.json").get("transformers_weights")) is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise ModelError(
                f"{where}: transformers_weights must name safetensors or their index, found {named!r}"
            )
        return _inside(where, named)
    for name in (WHOLE, INDEX):
        if (files.path / name).is_file():
            return name
    return _single(files, [name for name in present if not name.startswith("adapter_")])


def _single(files: ModelFiles, present: list[str]) -> str:
    shards = [name for name in present if _SHARD.search(name)]
    if shards:
        raise ModelError(f"{files.path}: {shards[0]} is one of several files, and their {INDEX} is missing")
    if len(present) > 1:
        names = ", ".join(present[:_SHOWN])
        raise ModelError(f"{files.path}: which weights? found {names}; rename those to serve to {WHOLE}")
    if present:
        return present[0]
    endings = (".bin", ".pt", ".pth", ".safetensors")
    others = sorted(path.name for path in files.path.iterdir() if path.suffix in endings)
    found = f"; found {', '.join(others)}, which Isthmus does not open" if others else ""
    wanted = "convert the model to safetensors, adapters merged"
    raise ModelError(f"{files.path}: no .safetensors weights of a whole model{found}; {wanted}")


def _listed(files: ModelFiles, index: str) -> tuple[str, ...]:
    where, listed = files.where(index), files.required_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{where}: weight_map must give each tensor's file name")
    return tuple(_inside(where, name) for name in sorted(set(listed.values())))


def _inside(where: str, name: str) -> str:
    """Checks a name, not where a link leads: files of downloaded models are links."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ModelError(f"{where}: names weights outside the model's folder: {name!r}")
    return name
