"""Writes model folders: Llamas with random weights, for benchmarks and tests that have no network, and GGUF files.

Knows nothing of any server. Torch and transformers are imported inside the functions, so that importing this module
costs nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from isthmus.cli.models import bytes_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE, BOS_ID, EOS_ID = 272, 256, 257
"""Of the tokenizer in `bytes_folder()`: a token for each byte, ids 0 to 255, and special ones behind them."""


BENCH_MODELS: dict[str, dict[str, int]] = {
    "llama-256x8": {"hidden_size": 256, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2},
    "llama-512x12": {"hidden_size": 512, "num_layers": 12, "num_heads": 8, "num_kv_heads": 4},
}


def make_random_model(
    path: Path,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: str,
    max_position_embeddings: int = 8192,
    seed: int = 0,
) -> None:
    """Write a Llama folder with random weights to `path`, which is made if missing.

    `dtype` is "bfloat16" or "float32"; one seed gives the same weights in both, rounded in the first. The weights are
    so large that greedy output varies: at the usual scale a random model repeats one token, and equal outputs would
    prove nothing.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype must be bfloat16 or float32, not {dtype}")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.15 * (256 / hidden_size) ** 0.5,  # the same gain of a matrix at any width
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bytes_folder() / name, path / name)


def unpack_model(file: Path, folder: Path) -> None:
    """Write a GGUF file as the folder that other servers read: its weights in bfloat16, tokenizer, chat template."""
    import torch
    from transformers import AutoTokenizer

    model: Any = gguf_reference(file)
    model.to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def gguf_reference(path: Path, attention: str = "eager") -> PreTrainedModel:
    """In float32: what `from_pretrained` makes of `gguf_file`, without the package that it moves large models with."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with _read_once(path):
        config = load_gguf_checkpoint(path)["config"]
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), attn_implementation=attention
            )
        model.tie_weights()
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    left = model.float().load_state_dict(tensors, strict=False)
    assert left.missing_keys == (["lm_head.weight"] if config["tie_word_embeddings"] else [])
    return model.eval()


@contextlib.contextmanager
def _read_once(path: Path) -> Iterator[None]:
    """transformers reads the file anew at each call, and makes a table of names for each module of a model."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        """Of a plain array, of which a slice takes a quarter of the time that one of a `memmap` does."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    reader = Reader(path)
    with (
        mock.patch.object(gguf, "GGUFReader", return_value=reader),
        mock.patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        yield
