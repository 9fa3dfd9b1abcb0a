"""Loads weights, of safetensors or of a GGUF file, and digests them into the model revision.

How a layer's are arranged is in `layers`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import blake3
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.core.errors import ModelError
from isthmus.core.models import Fields, ModelSpec, read_quantisation
from isthmus.live.engine.layers import Layer, Linear, load_layer
from isthmus.live.engine.quantised import FLOATS, packed_name, stored
from isthmus.live.engine.tiles import Tiled, Weight
from isthmus.model_files import GgufFile, ModelFiles, open_files, weight_files

log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Weights:
    """The tensors of a half-open range of a model's layers, and the digest of the whole model's bytes.

    `dtype`: as matrices are stored. The first layer brings the embedding with it, the last one the final norm and the
    head; None elsewhere.
    """

    range: tuple[int, int]
    dtype: torch.dtype
    embedding: Weight | None
    layers: tuple[Layer, ...]
    final_norm: Tensor | None
    head: Linear | None
    revision: str


class _Stored(Protocol):
    """Tensors as they lie in files, by name."""

    @property
    def digest(self) -> blake3.blake3:
        """Of all that were taken."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """A copy; none of its numbers on the device "meta". Raises ModelError."""

    def grouped(self, name: str, shape: tuple[int, ...]) -> Tiled | None:
        """The same, quantised as it lies there; None where it is not, or not so. A tensor may be taken in both forms.
        Raises ModelError."""

    def unties(self) -> bool:
        """Whether there is a head that is not the embedding, whatever config.json says."""

    def finish(self) -> str:
        """The digest, after the last. Raises ModelError when something is left that should have been taken."""


class _Safetensors:
    """Over one or many files of a folder."""

    def __init__(self, files: ModelFiles, stack: ExitStack) -> None:
        self.folder = files.path
        self.digest = blake3.blake3()
        config = Fields(files.where("config.json"), files.object("config.json"))
        self._quantisation = read_quantisation(config)
        if self._quantisation is not None:  # it says what the tensors mean
            self.digest.update(msgspec.json.encode(self._quantisation))
        chosen = weight_files(files)
        if chosen.note:
            log.warning("%s: %s", self.folder, chosen.note)
        opened: dict[str, Any] = {name: self._open(name, stack) for name in chosen.names}
        where = {key: file for file in opened.values() for key in file.keys()}  # noqa: SIM118
        self._parts = _Parts(self.folder, where, self.digest)

    def _open(self, name: str, stack: ExitStack) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise ModelError(f"{path}: no such file, though the model's weights should be there")
        try:
            return stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from None

    def has(self, name: str) -> bool:
        """Under its own name, or as a quantised matrix."""
        packed = name if self._quantisation is None else packed_name(self._quantisation, name)
        return self._parts.has(name) or self._parts.has(packed)

    def grouped(self, name: str, shape: tuple[int, ...]) -> Tiled | None:
        found = None if self._quantisation is None else stored(self._quantisation, self._parts, name, shape)
        return None if found is None else found.grouped()

    def unties(self) -> bool:
        if not (self._parts.has(_EMBEDDING) and self._parts.has(_HEAD)):
            return False
        embedding, head = (self._parts.where[name].get_tensor(name) for name in (_EMBEDDING, _HEAD))
        return embedding.dtype != head.dtype or not torch.equal(embedding, head)

    def finish(self) -> str:
        """There may be more tensors: published models have some that the network does not use."""
        return self.digest.hexdigest(length=16)

    def take(self, name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Digested on the way; what is quantised is widened."""
        found = None if self._quantisation is None else stored(self._quantisation, self._parts, name, shape)
        if found is None:
            return self._parts.read(name, FLOATS, shape).to(device, dtype)
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return found.widened(dtype).to(device)


@dataclass(frozen=True)
class _Parts:
    """Tensors of a folder as they are stored. `where`: the opened file of each. `digest`: of all that were read, once
    each: `digested`."""

    folder: Path
    where: Mapping[str, Any]
    digest: blake3.blake3
    digested: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.where

    def kind(self, name: str) -> str:
        return str(self.where[name].get_slice(name).get_dtype())

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        if name not in self.where:
            self.refuse(f"the weights have no tensor {name!r}")
        tensor: Tensor = self.where[name].get_tensor(name)
        if tuple(tensor.shape) not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            self.refuse(f"{name} has shape {tuple(tensor.shape)}, by config.json it is {expected}")
        if tensor.dtype not in dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.refuse(f"{name} is {tensor.dtype}; supported: {known}")
        if name not in self.digested:
            self.digested.add(name)
            self.digest.update(name.encode())
            self.digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def refuse(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.folder}: {reason}")


def load_weights(
    model: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    activations: torch.dtype,
    device: torch.device,
    layers: tuple[int, int] | None = None,
    groups: bool = False,
) -> Weights:
    """Reads and arranges the weights of a half-open range of layers, of all by default, in `dtype` on `device`; with
    `groups` those of products as they are quantised.

    The others are read too, for the revision, and not kept. Raises ModelError naming file or tensor.
    """
    held = range(*(layers or (0, spec.num_layers)))
    with ExitStack() as stack:
        stored = _stored(open_files(model), spec, stack)
        if spec.tied_embeddings and stored.unties():  # as transformers has it
            log.warning("%s: config.json ties the head to the embedding; the weights' own is used", model)
            spec = msgspec.structs.replace(spec, tied_embeddings=False)
        return _Loader(stored, spec, dtype, activations, device, groups).weights(held)


def _stored(files: ModelFiles, spec: ModelSpec, stack: ExitStack) -> _Stored:
    if not isinstance(files, GgufFile):
        return _Safetensors(files, stack)
    from isthmus.live.engine.quantised import GgufTensors

    return GgufTensors(files, spec.head_dim)


class _Loader:
    """Takes tensors by name, as `layers.Source` asks; those that are not held are digested and placed on no device."""

    def __init__(
        self,
        stored: _Stored,
        spec: ModelSpec,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
        groups: bool,
    ) -> None:
        self._stored, self._spec, self._device, self._groups = stored, spec, device, groups
        self.dtype, self._activations = dtype, activations
        self._target = device

    def weights(self, held: range) -> Weights:
        """Everything is taken, in one order, and so digested."""
        spec = self._spec
        first, last = 0 in held, spec.num_layers - 1 in held
        self._stored.digest.update(json.dumps(_identity(spec), sort_keys=True).encode())
        self._hold(first or (last and spec.tied_embeddings))
        embedding = self.matrix(_EMBEDDING, spec.vocab_size, spec.hidden_size)
        layers = []
        for index in range(spec.num_layers):
            self._hold(index in held)
            layer = load_layer(self, spec, index)
            if index in held:
                layers.append(layer)
        self._hold(last)
        final_norm = self.vector("model.norm.weight", spec.hidden_size) + spec.norm_offset
        if spec.tied_embeddings:
            head = Linear(self._grouped(_EMBEDDING, *embedding.shape) or embedding)
        else:
            head = Linear(self.weight(_HEAD, spec.vocab_size, spec.hidden_size))
        return Weights(
            (held.start, held.stop),
            self.dtype,
            embedding if first else None,
            tuple(layers),
            final_norm if last else None,
            head if last else None,
            self._stored.finish(),
        )

    def _hold(self, held: bool) -> None:
        """Whether the tensors taken from here on are kept."""
        self._target = self._device if held else torch.device("meta")

    def has(self, name: str) -> bool:
        return self._stored.has(name)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self._stored.take(name, shape, self._target, self.dtype)

    def weight(self, name: str, rows: int, width: int) -> Weight:
        return self._grouped(name, rows, width) or self.matrix(name, rows, width)

    def _grouped(self, name: str, rows: int, width: int) -> Tiled | None:
        if not self._groups or self._target.type == "meta":
            return None
        return self._stored.grouped(name, (rows, width))

    def bias(self, name: str, size: int) -> Tensor:
        return self._stored.take(name, (size,), self._target, self._activations)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._stored.take(name, shape, self._target, torch.float32).contiguous()


def _identity(spec: ModelSpec) -> object:
    """The fields of the spec that change what the weights compute."""
    return msgspec.to_builtins(msgspec.structs.replace(spec, dtype="", max_length=0))
