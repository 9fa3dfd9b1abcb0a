"""A small model folder: a byte-level tokenizer with 256 byte tokens, one merge, and special tokens.

The token of byte b has id b.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from isthmus.live.gateway.tokenizer import BYTE_OF_CHAR

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HE = 256  # the one merge
BOS = 257
EOS = 258
PADDING = 299  # in the model's vocabulary, but not in the tokenizer's


def byte_tokens(text: str | bytes) -> list[int]:
    """`text` as byte tokens, without merges."""
    return list(text.encode() if isinstance(text, str) else text)


def tokenizer() -> Tokenizer:
    vocabulary = dict(BYTE_OF_CHAR) | {"he": HE}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    built.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return built


def write(folder: Path, **files: object) -> Path:
    """A model folder in `folder`; `files`: name without suffix -> JSON content, to replace the usual one."""
    tokenizer().save(str(folder / "tokenizer.json"))
    contents: dict[str, object] = {
        "tokenizer_config": {
            "bos_token": {"content": "<bos>"},
            "eos_token": "<eos>",
            "chat_template": TEMPLATE,
        },
        "config": {"eos_token_id": EOS},
    } | files
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
