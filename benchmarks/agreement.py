"""Greedy tokens in bfloat16: the share of real prompts whose answer is, token by token, that of transformers.

In bfloat16 no two implementations add in the same order, and where two tokens are nearly as likely the answers part.
So our share is to be read beside another server's on the same prompts. Prompts go as token ids, so that no tokenizer
matters, and end tokens do not end an answer. transformers answers once, and what it said is kept in a file.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.table import Table

from benchmarks.peers.servers import Running, Side, running
from isthmus.bench import BenchError

CONCURRENCIES = (1, 8)

Tokens = tuple[int, ...]
Report = Callable[[str], None]


class Answer(msgspec.Struct, frozen=True):
    """Token ids of a prompt and of what followed it."""

    prompt: Tokens
    tokens: Tokens


class Share(msgspec.Struct, frozen=True):
    """One side at one concurrency. `leading`: how many of its first tokens an answer has in common with the
    reference, in the mean over all prompts."""

    side: str
    concurrency: int
    prompts: int
    equal: int
    leading: float


class Plan(msgspec.Struct, frozen=True):
    """`model`: a folder in bfloat16; `folder`: where logs and what transformers answered are kept."""

    model: Path
    texts: tuple[str, ...]
    num_tokens: int
    folder: Path


def run(plan: Plan, sides: Sequence[Side], report: Report) -> list[Share]:
    """Raises BenchError, StartError."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    reference = Reference(plan, report).answers()
    shares = []
    for side in sides:
        with running(side, plan.folder / f"{side.name}.log") as server:
            for concurrency in CONCURRENCIES:
                report(f"{side.name}: {len(reference)} prompts, {concurrency} at a time")
                found = asyncio.run(ask(server, reference, plan.num_tokens, concurrency))
                shares.append(share_of(side.name, concurrency, reference, found))
    return shares


# transformers.


class Reference:
    """What transformers answers in bfloat16, one prompt at a time. A run that was cut short goes on where it was."""

    def __init__(self, plan: Plan, report: Report) -> None:
        self._plan, self._report = plan, report
        self._file = plan.folder / f"transformers-{plan.num_tokens}.json"
        self._kept = {answer.prompt: answer for answer in self._read()}

    def answers(self) -> list[Answer]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        template: Any = AutoTokenizer.from_pretrained(self._plan.model).apply_chat_template
        talks = [[{"role": "user", "content": text}] for text in self._plan.texts]
        prompts = [tuple(template(talk, add_generation_prompt=True, return_dict=False)) for talk in talks]
        if missing := [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._kept]:
            self._report(f"transformers: {len(missing)} prompts, {len(prompts) - len(missing)} are known")
            model = AutoModelForCausalLM.from_pretrained(self._plan.model, dtype="bfloat16").eval()
            model.generation_config.eos_token_id = None
            for number, prompt in enumerate(missing, 1):
                self._kept[prompt] = Answer(prompt, _generate(model, prompt, self._plan.num_tokens))
                if number % 10 == 0 or number == len(missing):
                    self._file.write_bytes(msgspec.json.encode(list(self._kept.values())))
                    self._report(f"transformers: {number} of {len(missing)}")
        return [self._kept[prompt] for prompt in prompts]

    def _read(self) -> list[Answer]:
        if not self._file.exists():
            return []
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[Answer])
        except msgspec.MsgspecError as error:
            raise BenchError(f"{self._file}: holds no answers: {error}") from None


def _generate(model: Any, prompt: Tokens, num_tokens: int) -> Tokens:
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
    return tuple(found[0, len(prompt) :].tolist())


# A server.


async def ask(server: Running, reference: Sequence[Answer], num_tokens: int, concurrency: int) -> list[Tokens]:
    """Its greedy tokens after each prompt, in their order. Raises BenchError for an answer of another length."""
    gate = asyncio.Semaphore(concurrency)
    fields = {"model": server.model, "max_tokens": num_tokens, "temperature": 0}
    fields |= {"ignore_eos": True, "return_token_ids": True}

    async def tokens(prompt: Tokens) -> Tokens:
        async with (
            gate,
            session.post(f"{server.url}/v1/completions", json={**fields, "prompt": prompt}) as reply,
        ):
            if reply.status != 200:
                raise BenchError(f"{server.url} answered {reply.status}: {(await reply.text())[:300]}")
            found = tuple((await reply.json())["choices"][0]["token_ids"])
        if len(found) != num_tokens:
            raise BenchError(f"{server.url} answered {len(found)} tokens and not {num_tokens}")
        return found

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_read=600)) as session:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(tokens(answer.prompt)) for answer in reference]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def share_of(side: str, concurrency: int, reference: Sequence[Answer], found: Sequence[Tokens]) -> Share:
    common = [leading(answer.tokens, tokens) for answer, tokens in zip(reference, found, strict=True)]
    equal = sum(answer.tokens == tokens for answer, tokens in zip(reference, found, strict=True))
    return Share(side, concurrency, len(common), equal, statistics.fmean(common))


def leading(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def table(plan: Plan, shares: Sequence[Share]) -> Table:
    shown = Table(title=f"{plan.num_tokens} greedy tokens beside transformers in bfloat16")
    for head in ("", "concurrency", "prompts", "equal", "share", "tokens until they part, mean"):
        shown.add_column(head, justify="left" if not head else "right")
    for each in shares:
        part = f"{100 * each.equal / each.prompts:.1f} %"
        numbers = (str(each.concurrency), str(each.prompts), str(each.equal), part, f"{each.leading:.1f}")
        shown.add_row(each.side, *numbers)
    return shown
