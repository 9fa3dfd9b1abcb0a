"""A small Llama that recalls: trained in minutes on one CPU, beside the benchmark of assembled prompts.

A text is words without meaning, in which pairs of a key and its value stand; behind it keys are asked for, and the next
token is the key's value. In nine of ten training steps the first `NUM_LOCAL` layers see a few tokens only, so that what
stands far away is read in the layers behind, as in large models. Else two layers of four would do, whose KV every
selector computes anyway, and no donor could do harm.

The folder is a Hugging Face Llama's (config.json, model.safetensors), without a tokenizer. The same seed gives the same
weights on the same machine.

Legend: B texts, T tokens, N hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.bench import BenchError

BOS, ASK = 0, 1
KEYS = range(16, 80)
VALUES = range(80, 144)
WORDS = range(144, 400)
VOCAB_SIZE = 400
NUM_LOCAL, WINDOW, LOCAL_SHARE = 2, 8, 0.9
THETA, EPS = 10_000.0, 1e-6
LEARNED = 0.9


class Shape(msgspec.Struct, frozen=True):
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Training(msgspec.Struct, frozen=True):
    """`stages`: tokens of a text, pairs in it, texts of a step, steps. Two pairs come first: with eight from
    the beginning 900 steps taught a third of the answers, and with two, then four, 350 steps nearly all."""

    seed: int = 0
    threads: int = 1
    learning_rate: float = 2e-3
    stages: tuple[tuple[int, int, int, int], ...] = (
        (8, 2, 128, 150),
        (12, 4, 96, 150),
        (24, 8, 64, 200),
        (128, 16, 24, 200),
        (416, 24, 8, 250),
    )


def text_of(pairs: Sequence[tuple[int, int]], num_tokens: int, rng: random.Random) -> list[int]:
    """Words with these pairs among them, in their order."""
    num_words = num_tokens - 2 * len(pairs)
    assert num_words >= 0, "the pairs fit into the text"
    gaps = sorted(rng.randrange(num_words + 1) for _ in pairs)
    found, placed = list[int](), 0
    for gap, pair in zip(gaps, pairs, strict=True):
        found += [rng.choice(WORDS) for _ in range(gap - placed)]
        found += pair
        placed = gap
    return found + [rng.choice(WORDS) for _ in range(num_words - placed)]


def pairs_of(count: int, rng: random.Random) -> list[tuple[int, int]]:
    return [(key, rng.choice(VALUES)) for key in rng.sample(KEYS, count)]


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, keys = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.q_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor, angles_TD: Tensor, mask_TT: Tensor | None) -> Tensor:
        q, k, v = (
            each(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, angles_TD), _rotated(k, angles_TD)
        out = F.scaled_dot_product_attention(q, k, v, mask_TT, is_causal=mask_TT is None, enable_gqa=True)
        found: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return found


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(shape.hidden_size, EPS) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(shape), Gated(shape)

    def forward(self, x: Tensor, angles_TD: Tensor, mask_TT: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles_TD, mask_TT)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Llama(nn.Module):
    """Weights have the names that Hugging Face gives them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.num_layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, EPS)
        self.head = nn.Linear(shape.hidden_size, VOCAB_SIZE, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # What adds to the residual is small at first, so that it still says which token this is.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = parameter.shape[1] ** -0.5 * ((2 * shape.num_layers) ** -0.5 if adds else 1.0)
                nn.init.normal_(parameter, std=1.0 if name.startswith("embed") else std)

    def forward(self, tokens_BT: Tensor, *, local: bool) -> Tensor:
        """`[B, T, N]`, normed. `local`: the first layers see `WINDOW` tokens."""
        size, at_T = self.shape.head_dim, torch.arange(tokens_BT.shape[1])
        angles_TD = at_T[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
        angles_TD = torch.cat((angles_TD, angles_TD), 1)
        distance_TT = at_T[:, None] - at_T
        near_TT = (distance_TT >= 0) & (distance_TT < WINDOW)
        x = self.embed_tokens(tokens_BT)
        for number, layer in enumerate(self.layers):
            x = layer(x, angles_TD, near_TT if local and number < NUM_LOCAL else None)
        found: Tensor = self.norm(x)
        return found


def _rotated(x: Tensor, angles_TD: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * angles_TD.cos() + torch.cat((-other, one), -1) * angles_TD.sin()


def train(shape: Shape, training: Training, report: Callable[[str], None] = lambda line: None) -> Llama:
    """Raises BenchError if it does not learn."""
    torch.set_num_threads(training.threads)
    torch.manual_seed(training.seed)
    rng, model = random.Random(training.seed), Llama(shape)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    total, done, started = sum(stage[-1] for stage in training.stages), 0, time.perf_counter()
    right = 0.0
    for num_tokens, num_pairs, num_texts, num_steps in training.stages:
        for step in range(num_steps):
            rate = min(1.0, (done + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * done / total)))
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * rate
            loss, right = _step(model, num_tokens, num_pairs, num_texts, rng)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            if step % 100 == 99 or step + 1 == num_steps:
                took = time.perf_counter() - started
                report(f"{took:.0f} s, step {done} of {total}, texts of {num_tokens} tokens: {right:.1%} right")
    if right < LEARNED:
        raise BenchError(f"the recall model did not learn: {right:.0%} of its answers are right")
    return model


def _step(
    model: Llama, num_tokens: int, num_pairs: int, num_texts: int, rng: random.Random
) -> tuple[Tensor, float]:
    """Loss and share of right answers of some texts, each with all of its keys asked for in another order."""
    rows = list[list[int]]()
    for _ in range(num_texts):
        pairs = pairs_of(num_pairs, rng)
        asked = [token for pair in rng.sample(pairs, num_pairs) for token in (ASK, *pair)]
        rows.append([BOS, *text_of(pairs, num_tokens, rng), *asked])
    tokens_BT = torch.tensor(rows)
    x = model(tokens_BT[:, :-1], local=rng.random() < LOCAL_SHARE)
    values = tokens_BT[:, num_tokens + 3 :: 3]
    logits = model.head(x[:, num_tokens + 2 :: 3])
    right = (logits.argmax(-1) == values).float().mean().item()
    return F.cross_entropy(logits.flatten(0, 1), values.flatten()), right


def save(model: Llama, folder: Path) -> None:
    """Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": BOS,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    weights = {f"model.{name}": each.detach().contiguous() for name, each in model.named_parameters()}
    weights["lm_head.weight"] = weights.pop("model.head.weight")
    save_file(weights, folder / "model.safetensors")
