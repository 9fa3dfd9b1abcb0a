"""Writes model folders: Llamas with random weights, for benchmarks and tests that have no network, and GGUF files.

Owns the folder's contents: weights, tokenizer and the JSON files beside them, in the form Hugging Face
tools read. Knows nothing of any server. Torch, safetensors and tokenizers are imported inside the functions,
so that importing this module costs nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class ModelShape(TypedDict):
    """The arguments of `make_random_model` that set a model's size."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int


BENCH_MODELS: dict[str, ModelShape] = {
    "llama-256x8": {"hidden_size": 256, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2},
    "llama-512x12": {"hidden_size": 512, "num_layers": 12, "num_heads": 8, "num_kv_heads": 4},
}

# Token ids 0 to 255 are the bytes themselves; the special tokens follow, then filler up to `vocab_size`.
NUM_BYTES = 256
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = NUM_BYTES, NUM_BYTES + 1, NUM_BYTES + 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_random_model(
    path: Path,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: str,
    vocab_size: int = 512,
    intermediate_size: int | None = None,
    max_position_embeddings: int = 8192,
    seed: int = 0,
) -> None:
    """Write a Llama folder with random weights to `path`, which is made if missing.

    `dtype` is "bfloat16" or "float32"; one seed gives the same weights in both, rounded in the first.
    `intermediate_size` is four times `hidden_size` if not given. The weights are so large that greedy output
    varies: at the usual scale a random model repeats one token, and equal outputs would prove nothing.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype must be bfloat16 or float32, not {dtype}")
    if hidden_size % num_heads or num_heads % num_kv_heads:
        raise ValueError("num_heads must divide hidden_size, and num_kv_heads must divide num_heads")
    if vocab_size < NUM_BYTES + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be at least {NUM_BYTES + len(SPECIAL_TOKENS)}")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "dtype": dtype,
        "eos_token_id": EOS_ID,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": _weight_std(hidden_size),
        "intermediate_size": intermediate_size or 4 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_kv_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    token_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(path / "generation_config.json", token_ids)
    _write_tokenizer(path, vocab_size, max_position_embeddings)
    _write_weights(path / "model.safetensors", config, seed)


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


def _weight_std(hidden_size: int) -> float:
    """Standard deviation of the weights: 0.15 at width 256, and the same gain per matrix at any other."""
    return 0.15 * float((256 / hidden_size) ** 0.5)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor's Hugging Face name and shape, in the order they are drawn."""
    hidden, intermediate, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _write_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """Draw the weights in float32, round them to the model's dtype and save them; norm weights are one."""
    import torch
    from safetensors.torch import save_file

    dtype = torch.bfloat16 if config["dtype"] == "bfloat16" else torch.float32
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in _weight_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=dtype)
        else:
            drawn = torch.randn(shape, generator=generator) * config["initializer_range"]
            tensors[name] = drawn.to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def _byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(NUM_BYTES)]


def _write_tokenizer(path: Path, vocab_size: int, max_length: int) -> None:
    """Write a tokenizer without merges: text becomes its UTF-8 bytes, one token each.

    Filler ids never come out of text, but the model may emit them; each decodes to its own readable name.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    filler = [f"<{token_id}>" for token_id in range(NUM_BYTES + len(SPECIAL_TOKENS), vocab_size)]
    tokens = [*_byte_letters(), *SPECIAL_TOKENS, *filler]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, pad = SPECIAL_TOKENS[:3]
    settings = {
        "bos_token": bos,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": max_length,
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(path / "tokenizer_config.json", settings)
