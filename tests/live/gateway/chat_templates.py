"""Chat templates as published models have them: the same forms, written anew and shorter.

What they have in common with the originals is what a conversation with tools turns into, and which features of the
template language they use. `smollm2` knows nothing of tools; `qwen25` is Hermes form; `mistral_args`, of later models,
has each call with its name before its arguments. `guard` reads parts, whoever says them (Llama Guard and its kin),
`macro` the same by way of variables and a macro; `gemma3` reads either, of the system's parts the first; `pixtral`
either of users, and texts of others.
"""

from __future__ import annotations

from pathlib import Path


def _read(name: str) -> str:
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


SMOLLM2, QWEN25, LLAMA31, QWEN_CODER = map(_read, ("smollm2", "qwen25", "llama31", "qwen_coder"))
MISTRAL, MISTRAL_ARGS = map(_read, ("mistral", "mistral_args"))
GUARD, MACRO, GEMMA3, PIXTRAL = map(_read, ("guard", "macro", "gemma3", "pixtral"))
PARTS = {"guard": GUARD, "macro": MACRO, "gemma3": GEMMA3, "pixtral": PIXTRAL}

ALL = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "llama3.1": LLAMA31,
    "qwen3-coder": QWEN_CODER,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
}
