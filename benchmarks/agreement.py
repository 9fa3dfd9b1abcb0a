"""Greedy tokens in bfloat16: the share of real prompts whose answer is, token by token, that of transformers.

In bfloat16 no two implementations add in the same order, and where two tokens are nearly as likely the answers part.
So our share is to be read beside another server's on the same prompts. Prompts go as token ids, so that no tokenizer
matters, and end tokens do not end an answer. transformers answers once, and what it said is kept in a file.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from typer import Option

from benchmarks.options import ModelFolder, ServeOptions, VllmPython
from benchmarks.served import Running, isthmus, running, vllm
from isthmus.bench import BenchError
from isthmus.bench.reuse_pairs import prose
from isthmus.bench.serve import connected, together
from isthmus.bench.study import Columns, Outcome, Report, silent, table
from isthmus.core.errors import ConfigError

CONCURRENCIES = (1, 8)

Tokens = tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """Token ids of a prompt and of what followed it."""

    prompt: Tokens
    tokens: Tokens


@dataclass(frozen=True)
class Plan:
    model: ModelFolder
    folder: Annotated[Path, Option(help="Where logs and the answers of transformers are kept.")]
    vllm_python: VllmPython | None = None
    texts: Annotated[
        Path | None,
        Option(help="Folder of prose in .txt, .md, .rst or .py; default: what is installed with Python."),
    ] = None
    count: Annotated[int, Option(min=1, help="How many paragraphs of it.")] = 200
    tokens: Annotated[int, Option(min=1, help="Tokens of each answer.")] = 64
    options: ServeOptions = ()


def run(plan: Plan, report: Report = silent) -> Outcome:
    """The share of real prompts whose greedy tokens in bfloat16 equal those of transformers: ours, and vLLM's."""
    texts = [" ".join(passage) for passage in prose(plan.texts)][: plan.count]
    if len(texts) < plan.count:
        raise ConfigError(f"--count {plan.count}: there are only {len(texts)} paragraphs")
    plan.folder.mkdir(parents=True, exist_ok=True)
    reference = answers_of_transformers(plan, texts, report)
    sides = [isthmus("isthmus", plan.model, plan.options)]
    if plan.vllm_python is not None:
        sides.append(vllm(plan.vllm_python, plan.model, []))
    rows = []
    for side in sides:
        with running(side, plan.folder / f"{side.name}.log") as server:
            for concurrency in CONCURRENCIES:
                report(f"{side.name}: {len(reference)} prompts, {concurrency} at a time")
                found = asyncio.run(ask(server, reference, plan.tokens, concurrency))
                rows.append({"side": side.name, "concurrency": concurrency} | share_of(reference, found))
    columns: Columns = {
        "": "side", "concurrency": "concurrency", "prompts": "prompts", "equal": "equal",
        "share": lambda row: f"{100 * row['equal'] / row['prompts']:.1f} %",
        "tokens until they part, mean": "leading",
    }  # fmt: skip
    return Outcome([table(f"{plan.tokens} greedy tokens beside transformers in bfloat16", columns, rows)], rows)


def answers_of_transformers(plan: Plan, texts: Sequence[str], report: Report) -> list[Answer]:
    """In bfloat16, one prompt at a time. A run that was cut short goes on where it was."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = plan.folder / f"transformers-{plan.tokens}.json"
    known = {answer.prompt: answer for answer in _kept(file)}
    template: Any = AutoTokenizer.from_pretrained(plan.model).apply_chat_template
    talks = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tuple(template(talk, add_generation_prompt=True, return_dict=False)) for talk in talks]
    if missing := [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]:
        report(f"transformers: {len(missing)} prompts, {len(prompts) - len(missing)} are known")
        model = AutoModelForCausalLM.from_pretrained(plan.model, dtype="bfloat16").eval()
        model.generation_config.eos_token_id = None
        for number, prompt in enumerate(missing, 1):
            known[prompt] = Answer(prompt, _generate(model, prompt, plan.tokens))
            if number % 10 == 0 or number == len(missing):
                file.write_bytes(msgspec.json.encode(list(known.values())))
                report(f"transformers: {number} of {len(missing)}")
    return [known[prompt] for prompt in prompts]


def _kept(file: Path) -> list[Answer]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[Answer]) if file.exists() else []
    except msgspec.MsgspecError as error:
        raise BenchError(f"{file}: holds no answers: {error}") from None


def _generate(model: Any, prompt: Tokens, num_tokens: int) -> Tokens:
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(found[0, len(prompt) :].tolist())


async def ask(server: Running, reference: Sequence[Answer], num_tokens: int, concurrency: int) -> list[Tokens]:
    """Its greedy tokens after each prompt, in their order. Raises BenchError for an answer of another length."""
    fields = {"model": server.model, "max_tokens": num_tokens, "temperature": 0}
    fields |= {"ignore_eos": True, "return_token_ids": True}

    async def tokens(session: aiohttp.ClientSession, prompt: Tokens) -> Tokens:
        async with session.post(f"{server.url}/v1/completions", json={**fields, "prompt": prompt}) as reply:
            if reply.status != 200:
                raise BenchError(f"{server.url} answered {reply.status}: {(await reply.text())[:300]}")
            found = tuple((await reply.json())["choices"][0]["token_ids"])
        if len(found) != num_tokens:
            raise BenchError(f"{server.url} answered {len(found)} tokens and not {num_tokens}")
        return found

    async with connected() as session:
        return await together((tokens(session, answer.prompt) for answer in reference), concurrency)


def share_of(reference: Sequence[Answer], found: Sequence[Tokens]) -> dict[str, Any]:
    """`leading`: how many of its first tokens an answer has in common with the reference, mean over all prompts."""
    pairs = [(answer.tokens, tokens) for answer, tokens in zip(reference, found, strict=True)]
    common = statistics.fmean([leading(one, other) for one, other in pairs])
    return {"prompts": len(pairs), "equal": sum(one == other for one, other in pairs), "leading": common}


def leading(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
