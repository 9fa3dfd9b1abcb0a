"""Loads safetensors weights, and digests them into the model revision. How a layer's are arranged is in `layers`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.engine.layers import Layer, Linear, load_layer
from isthmus.engine.spec import load_json
from isthmus.errors import ModelError
from isthmus.models import ModelSpec


@dataclass(frozen=True)
class Weights:
    """The tensors of a half-open range of a model's layers, and the digest of the whole model's bytes.

    `dtype`: as matrices are stored. The first layer brings the embedding with it, the last one the final norm and the
    head; None elsewhere.
    """

    range: tuple[int, int]
    dtype: torch.dtype
    embedding: Tensor | None
    layers: tuple[Layer, ...]
    final_norm: Tensor | None
    head: Linear | None
    revision: str


class _Folder:
    """Tensors of a model folder by name, over one or many safetensors files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.digest = blake3.blake3()
        self._files: dict[str, Any] = {name: self._open(name, stack) for name in self._file_names()}
        self._where = {key: name for name, file in self._files.items() for key in file.keys()}  # noqa: SIM118

    def _file_names(self) -> list[str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            listed = load_json(index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise ModelError(f"{index}: weight_map must give each tensor's file name")
            return sorted(set(listed.values()))
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if names:
            return names
        others = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"; found {', '.join(others)}, which Isthmus does not open" if others else ""
        raise ModelError(f"{self.folder}: no .safetensors weights{found}; convert the model to safetensors")

    def _open(self, name: str, stack: ExitStack) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise ModelError(f"{path}: listed in the weight index but not there")
        try:
            return stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a readable safetensors file: {error}") from None

    def has(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor in its stored type; digested on the way."""
        if name not in self._where:
            raise ModelError(f"{self.folder}: the weights have no tensor {name!r}")
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"{self.folder}: {name} is {tensor.dtype}; supported: float32, bfloat16, float16")
        self.digest.update(name.encode())
        self.digest.update(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)
        return tensor


def load_weights(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    activations: torch.dtype,
    device: torch.device,
    layers: tuple[int, int] | None = None,
) -> Weights:
    """Reads and arranges the weights of a half-open range of layers, of all by default, in `dtype` on `device`.

    The others are read too, for the revision, and not kept. Raises ModelError naming file or tensor.
    """
    held = range(*(layers or (0, spec.num_layers)))
    with ExitStack() as stack:
        return _Loader(_Folder(folder, stack), spec, dtype, activations, device).weights(held)


class _Loader:
    """Takes tensors by name, as `layers.Source` asks; those that are not held are digested and placed on no device."""

    def __init__(
        self,
        folder: _Folder,
        spec: ModelSpec,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
    ) -> None:
        self._folder, self._spec, self._device = folder, spec, device
        self._dtype, self._activations = dtype, activations
        self._target = device

    def weights(self, held: range) -> Weights:
        """Everything is taken, in one order, and so digested."""
        spec, folder = self._spec, self._folder
        first, last = 0 in held, spec.num_layers - 1 in held
        folder.digest.update(json.dumps(_identity(spec), sort_keys=True).encode())
        self._hold(first or (last and spec.tied_embeddings))
        embedding = self.matrix("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = []
        for index in range(spec.num_layers):
            self._hold(index in held)
            layer = load_layer(self, spec, index)
            if index in held:
                layers.append(layer)
        self._hold(last)
        final_norm = self.vector("model.norm.weight", spec.hidden_size) + spec.norm_offset
        if spec.tied_embeddings:
            head = Linear(embedding)
        else:
            head = Linear(self.matrix("lm_head.weight", spec.vocab_size, spec.hidden_size))
        return Weights(
            (held.start, held.stop),
            self._dtype,
            embedding if first else None,
            tuple(layers),
            final_norm if last else None,
            head if last else None,
            folder.digest.hexdigest(length=16),
        )

    def _hold(self, held: bool) -> None:
        """Whether the tensors taken from here on are kept."""
        self._target = self._device if held else torch.device("meta")

    def has(self, name: str) -> bool:
        return self._folder.has(name)

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self._folder.take(name, *shape).to(self._target, self._dtype)

    def bias(self, name: str, size: int) -> Tensor:
        return self._folder.take(name, size).to(self._target, self._activations)

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._folder.take(name, *shape).to(self._target, torch.float32).contiguous()


def _identity(spec: ModelSpec) -> object:
    """The fields of the spec that change what the weights compute."""
    return msgspec.to_builtins(msgspec.structs.replace(spec, dtype="", max_length=0))
