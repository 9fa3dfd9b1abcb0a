"""Random tiny models of every supported kind, made and run by transformers: the reference of the tests.

The tokenizer has one token a byte (the token of byte b has id b) and special tokens from 256 on.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB_SIZE = 272
BOS, EOS, USER, ASSISTANT, SYSTEM = range(256, 261)
SPECIALS = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "<|eos|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}

MODEL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-shards": ("llama", {"shards": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 40, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen2-tied-shards": ("qwen2", {"tie_word_embeddings": True, "shards": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias-yarn-window": (
        "qwen3",
        {
            "head_dim": 20,
            "attention_bias": True,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Name -> (family, overrides), for `make_model(folder, family, **overrides)`."""

QUICK = "sdpa"
"""Attention of a prompt of some thousand tokens takes a tenth of the time that the plain way takes, and is as exact."""

_LOADING = threading.Lock()
"""transformers takes the tying of weights away from a class while it loads a model: of two threads that load at once
the second puts back what the first took away, and no model of the process is tied any more."""


def make_model(
    folder: Path, family: str, *, shards: bool = False, dtype: str = "float32", seed: int = 0, **overrides: Any
) -> None:
    """Writes a model folder: weights, config and tokenizer. `overrides` are fields of the transformers config.

    Biases and norm weights are random too, so that leaving one out shows. There is no end token in any file:
    a greedy answer runs to its limit.
    """
    config_class, model_class = _FAMILIES[family]
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "bos_token_id": BOS,
        "eos_token_id": None,
    }
    if family == "qwen3":
        fields["head_dim"] = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**(fields | overrides)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="100KB" if shards else "5GB")
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "do_sample": False})
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    spares = [f"<|spare_{index}|>" for index in range(VOCAB_SIZE - 256 - len(SPECIALS))]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS + spares])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def reference_logits(folder: Path, prompt_ids: Sequence[int]) -> Tensor:
    """Logits `[T, V]` in float32 at every position of the prompt, by transformers."""
    return _logits(_reference(folder), prompt_ids)


def reference_tokens(folder: Path, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The `n` tokens that follow the prompt, greedily and whatever end token there is, by transformers."""
    ids = torch.tensor([list(prompt_ids)])
    model = _reference(folder)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    tokens = answer[0, len(prompt_ids) :].tolist()
    assert len(tokens) == n
    return tokens


def _logits(model: transformers.PreTrainedModel, prompt_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(prompt_ids)])).logits[0].float()


def check_greedy(folder: Path, prompt_ids: Sequence[int], answer: Sequence[int]) -> None:
    """After all that comes before it each token is the likeliest one, by one pass of transformers. Where it is not, a
    likelier one may be so by no more than rounding could make of it there: CPUs add up in different orders, and where
    two experts of a router score nearly alike, one rounding more decides which of them computes."""
    known, first = [*prompt_ids, *answer[:-1]], len(prompt_ids) - 1
    logits = _logits(_reference(folder, QUICK), known)[first:]
    short = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    if not short.any():
        return
    sway = torch.zeros_like(short)
    for seed in range(4):
        swayed = _logits(_swayed(folder, seed), known)[first:]
        sway = torch.maximum(sway, (swayed - logits).abs().max(-1).values)
    wrong = (short > 4 * sway).nonzero()[:, 0].tolist()
    assert not wrong, f"not the likeliest: tokens {wrong} of the answer, by {short[wrong].tolist()}"


@lru_cache(maxsize=4)
def _swayed(folder: Path, seed: int) -> transformers.PreTrainedModel:
    """The reference with every weight off by some of its last bits."""
    model = copy.deepcopy(_reference(folder, QUICK)).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + 2.0**-21 * torch.randn(parameter.shape, generator=generator))
    return model


def _reference(folder: Path, attention: str = "eager") -> transformers.PreTrainedModel:
    with _LOADING:
        return _loaded(folder, attention)


@lru_cache(maxsize=4)
def _loaded(folder: Path, attention: str) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _byte_vocabulary() -> dict[str, int]:
    """GPT-2's character for each byte -> the byte: a printable one is itself, others start at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + rank): b for rank, b in enumerate(others)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
