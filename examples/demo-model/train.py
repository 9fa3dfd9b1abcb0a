"""Train the bundled demo model and write it as a Hugging Face model folder.

    python examples/demo-model/train.py [--out DIR] [--minutes M] [--threads N]

The model is a small Llama (grouped-query attention, rotary positions, SwiGLU, tied embeddings) that
reads and writes single bytes. It learns from the text in ``corpus.py``, which lies beside this file.
The seed fixes the weights at the start and the order of the text. With ``--minutes`` the number of
steps depends on the speed of the machine; ``--steps`` makes a run that can be repeated exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn

# Token ids 0 to 255 are the bytes themselves; the named tokens follow them.
SPECIALS = ["<|bos|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
SPECIALS += [f"<|reserved_{i}|>" for i in range(16 - len(SPECIALS))]
ID = {name: 256 + i for i, name in enumerate(SPECIALS)}
VOCAB = 256 + len(SPECIALS)
BOS, END = ID["<|bos|>"], ID["<|im_end|>"]

Batch = tuple[Tensor, Tensor, Tensor]

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 256, 4, 8, 4, 704
HEAD_DIM = HIDDEN // HEADS
ROPE_THETA, NORM_EPS, MAX_POSITIONS = 10000.0, 1e-5, 4096

# Rows and bytes per row of a batch: first short rows, in the second half of the run longer ones as well.
SHORT_SHAPES = [(4, 256)]
MIXED_SHAPES = [(4, 256)] * 5 + [(2, 512)] * 4 + [(1, 2048)]
PEAK_LR, FINAL_LR, WARMUP = 2e-3, 5e-5, 0.03  # WARMUP is a share of the whole run
# How much a byte counts in the loss. The first bytes of an answer decide which answer it is.
PROMPT_WEIGHT, START_WEIGHT, START_BYTES = 0.2, 4.0, 32
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "src" / "isthmus" / "demo"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The roles are system, user and assistant.') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Attention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the rows of ``x`` (batch, length, hidden) over earlier positions."""
        rows, length, _ = x.shape
        q = rotate(self.q_proj(x).view(rows, length, HEADS, HEAD_DIM).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(rows, length, KV_HEADS, HEAD_DIM).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(rows, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary position embedding, with the two halves of a head as pairs."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def rotary_tables(length: int) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables for positions 0 to ``length`` - 1."""
    rates = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(length), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


class Mlp(nn.Module):
    """The gated feed-forward part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the update for each position on its own."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer. The attribute names are those of the Hugging Face weights."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the attention update and then the feed-forward update."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model; the embedding matrix is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=NORM_EPS)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.05 / math.sqrt(2 * LAYERS) if residual else 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits for every position of ``ids`` (batch, length)."""
        x = self.embed_tokens(ids)
        cos, sin = rotary_tables(ids.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def encode(document: str | corpus.Chat) -> tuple[list[int], list[float]]:
    """Turn plain text or a chat into token ids and the weight of each in the loss."""
    turns = [("", document)] if isinstance(document, str) else document
    ids, weights = [BOS], [0.0]
    for role, text in turns:
        body = [*text.encode(), END]
        head = [ID[f"<|{role}|>"]] if role else []
        first = {"user": PROMPT_WEIGHT, "system": PROMPT_WEIGHT, "assistant": START_WEIGHT}.get(role, 1.0)
        rest = min(first, 1.0)
        ids += head + body
        weights += [0.0] * len(head) + [first if i < START_BYTES else rest for i in range(len(body))]
    return ids, weights


def make_batch(documents: Iterator[str | corpus.Chat], rows: int, length: int) -> Batch:
    """Return inputs, targets and loss weights. Every row starts where a document starts."""
    all_ids, all_weights = [], []
    for _ in range(rows):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= length:
            more_ids, more_weights = encode(next(documents))
            ids += more_ids
            weights += more_weights
        all_ids.append(ids[: length + 1])
        all_weights.append(weights[: length + 1])
    tokens, weight = torch.tensor(all_ids), torch.tensor(all_weights)
    return tokens[:, :-1], tokens[:, 1:], weight[:, 1:]


def loss_on(model: Llama, batch: Batch) -> Tensor:
    """Return the weighted mean cross-entropy of a batch, in nats per byte."""
    inputs, targets, weights = batch
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def train(minutes: float, steps: int | None, seed: int) -> tuple[Llama, dict[str, float]]:
    """Train for a time, or for a number of steps, and return the model and what it reached."""
    torch.manual_seed(seed)
    model = Llama()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    start, step, seen, mean = time.monotonic(), 0, 0, 0.0
    rng = random.Random(seed)
    documents = corpus.documents(rng)
    while True:
        elapsed = (time.monotonic() - start) / 60
        progress = step / steps if steps else elapsed / minutes
        if progress >= 1:
            break
        cosine = FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = cosine * min(1.0, (progress + 1e-3) / WARMUP)
        batch = make_batch(documents, *rng.choice(SHORT_SHAPES if progress < 0.5 else MIXED_SHAPES))
        loss = loss_on(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, seen = step + 1, seen + batch[0].numel()
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step:5d}  {elapsed:5.1f} min  {seen / 1e6:5.2f} MB  loss {mean:.3f}", flush=True)
    with torch.no_grad():  # the plain loss on answers and plain text, from another seed
        inputs, targets, weights = make_batch(corpus.documents(random.Random(seed + 1)), 32, 512)
        check = loss_on(model, (inputs, targets, (weights >= 1).float())).item()
    elapsed = (time.monotonic() - start) / 60
    return model, {"steps": step, "bytes": seen, "minutes": elapsed, "train_loss": mean, "check_loss": check}


@torch.no_grad()
def answer(model: Llama, question: str, most: int = 400) -> str:
    """Answer a question greedily, to show what the model has learned."""
    ids = [BOS, ID["<|user|>"], *question.encode(), END, ID["<|assistant|>"]]
    start = len(ids)
    while len(ids) < start + most:
        best = int(model(torch.tensor([ids]))[0, -1].argmax())
        if best == END:
            break
        ids.append(best)
    return bytes(i for i in ids[start:] if i < 256).decode(errors="replace")


def build_tokenizer() -> Tokenizer:
    """Build a tokenizer in which token i is byte i, and which puts <|bos|> before plain text."""
    # The byte-level format names each byte by a printable character: itself, or one from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B:1", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def write_folder(model: Llama, out: Path, facts: dict[str, float]) -> None:
    """Write the weights in bfloat16, the tokenizer, the configuration files and the model card."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": w.detach().to(torch.bfloat16) for name, w in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file leaves it readable by its owner only
    build_tokenizer().save(str(out / "tokenizer.json"))
    ends = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": ID["<|pad|>"]}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "hidden_act": "silu", "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16", **ends,
    }  # fmt: skip
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>", "model_max_length": MAX_POSITIONS, "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    generation = {**ends, "do_sample": True, "temperature": 0.4, "top_p": 0.95}
    files = {"config": config, "tokenizer_config": tokenizer_config, "generation_config": generation}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    card = (Path(__file__).parent / "model-card.md").read_text(encoding="utf-8")
    card = card.format(
        layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, specials=len(SPECIALS),
        positions=MAX_POSITIONS, parameters=sum(w.numel() for w in weights.values()),
        megabytes=(out / "model.safetensors").stat().st_size / 1e6, threads=torch.get_num_threads(),
        millions=facts["bytes"] / 1e6, prompt_weight=PROMPT_WEIGHT, start_weight=START_WEIGHT,
        start_bytes=START_BYTES, **facts,
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Read the arguments, train, write the folder, and print some answers."""
    parser = argparse.ArgumentParser(description="Train the demo model of Isthmus.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the model")
    parser.add_argument("--minutes", type=float, default=14.0, help="length of the run")
    parser.add_argument("--steps", type=int, help="number of steps, in place of a length in minutes")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, facts = train(args.minutes, args.steps, args.seed)
    write_folder(model, args.out, {**facts, "seed": args.seed})
    print(facts)
    for question in ["Hello", "What is Isthmus?", "What is a KV cache?", "Tell me a story"]:
        print(f"\n> {question}\n{answer(model, question)}")


if __name__ == "__main__":
    main()
