"""What a model's files say about generation: end tokens and default sampling."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import ModelError
from isthmus.model_files import ModelFiles, read_ends

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationDefaults:
    """`eos`: token ids that end an answer. The rest holds where a request says nothing; OpenAI's defaults."""

    eos: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


def load_generation(files: ModelFiles) -> GenerationDefaults:
    """Reads generation_config.json and what names the end tokens; all may be absent. End tokens that are ignored are
    logged.

    Raises ModelError when one of them is not JSON or holds a value of the wrong type.
    """
    generation, where = files.object("generation_config.json"), files.where("generation_config.json")
    eos, ignored = read_ends(files)
    for line in ignored:
        log.warning(line)
    repetition_penalty = _number(generation, "repetition_penalty", where, otherwise=1.0)
    if not repetition_penalty:
        raise ModelError(f"{where}: repetition_penalty must be above 0")
    if generation.get("do_sample") is not True:
        return GenerationDefaults(eos=eos, repetition_penalty=repetition_penalty)
    return GenerationDefaults(
        eos=eos,
        temperature=_number(generation, "temperature", where, otherwise=1.0),
        top_p=_number(generation, "top_p", where, otherwise=1.0),
        top_k=int(_number(generation, "top_k", where, otherwise=0)),
        repetition_penalty=repetition_penalty,
    )


def _number(config: dict[str, Any], name: str, where: str, *, otherwise: float) -> float:
    value = config.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelError(f"{where}: {name} must be a number of at least 0, found {value!r}")
    return float(value)
