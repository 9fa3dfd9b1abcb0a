"""Loads safetensors weights into the engine's own arrangement, and digests them into the model revision.

Fused once here: Q, K, V in one matrix, gate and up in one, so that a step is four matrix products a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.engine.spec import ModelSpec, load_json
from isthmus.errors import ModelError


@dataclass(frozen=True)
class Linear:
    """`x @ weight.T + bias`; weight `[out, in]` as stored, bias in the activations' type."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """Norm weights are float32 whatever the compute type: they are small and the kernels want them so."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True)
class Weights:
    """The tensors of a range of a model's layers, and the digest of the whole model's bytes.

    The first layer brings the embedding with it, the last one the final norm and the head; None elsewhere.
    """

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
    def __init__(
        self,
        source: _Folder,
        spec: ModelSpec,
        dtype: torch.dtype,
        activations: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source, self._spec, self._device = source, spec, device
        self._dtype, self._activations = dtype, activations
        self._target = device

    def weights(self, held: range) -> Weights:
        """Everything is taken, in one order, and so digested; what is not held is placed on no device."""
        spec, source = self._spec, self._source
        first, last = 0 in held, spec.num_layers - 1 in held
        source.digest.update(json.dumps(_identity(spec), sort_keys=True).encode())
        self._hold(first or (last and spec.tied_embeddings))
        embedding = self._place(source.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size))
        layers = tuple(layer for index, layer in enumerate(self._layers(held)) if index in held)
        self._hold(last)
        final_norm = self._norm("model.norm", spec.hidden_size)
        if spec.tied_embeddings:
            head = Linear(embedding)
        else:
            head = self._linear(("lm_head",), (spec.vocab_size,), spec.hidden_size, bias=False)
        return Weights(
            embedding if first else None,
            layers,
            final_norm if last else None,
            head if last else None,
            source.digest.hexdigest(length=16),
        )

    def _hold(self, held: bool) -> None:
        """Whether the tensors taken from here on are kept."""
        self._target = self._device if held else torch.device("meta")

    def _layers(self, held: range) -> Iterator[Layer]:
        spec = self._spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        for index in range(spec.num_layers):
            self._hold(index in held)
            at = f"model.layers.{index}"
            q, k, v = (f"{at}.self_attn.{name}_proj" for name in "qkv")
            mlp = f"{at}.mlp"
            yield Layer(
                attention_norm=self._norm(f"{at}.input_layernorm", hidden),
                qkv=self._linear((q, k, v), (q_size, kv_size, kv_size), hidden, bias=spec.qkv_bias),
                q_norm=self._norm(f"{at}.self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
                k_norm=self._norm(f"{at}.self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
                output=self._linear((f"{at}.self_attn.o_proj",), (hidden,), q_size, bias=spec.output_bias),
                mlp_norm=self._norm(f"{at}.post_attention_layernorm", hidden),
                gate_up=self._linear(
                    (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, bias=spec.mlp_bias
                ),
                down=self._linear((f"{mlp}.down_proj",), (hidden,), inner, bias=spec.mlp_bias),
                window=spec.windows[index],
            )

    def _linear(self, names: tuple[str, ...], outs: tuple[int, ...], width: int, *, bias: bool) -> Linear:
        parts = [self._source.take(f"{n}.weight", out, width) for n, out in zip(names, outs, strict=True)]
        weight = torch.cat([self._place(part) for part in parts])
        if not bias:
            return Linear(weight)
        biases = [self._source.take(f"{n}.bias", out) for n, out in zip(names, outs, strict=True)]
        return Linear(weight, torch.cat(biases).to(self._target, self._activations))

    def _norm(self, name: str, size: int) -> Tensor:
        return self._source.take(f"{name}.weight", size).to(self._target, torch.float32).contiguous()

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._target, self._dtype)


def _identity(spec: ModelSpec) -> dict[str, object]:
    """The fields of the spec that change what the weights compute."""
    rope = [spec.rope.theta, spec.rope.kind, spec.rope.options]
    return {"family": spec.family, "rope": rope, "windows": spec.windows, "eps": spec.norm_eps}
