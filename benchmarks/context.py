"""`python -m benchmarks context`: the longest request that nodes of small memory take, one alone and several together.

Measured by asking: what the server names as its limit is answered, and one token more is refused. The answer to the
longest is compared with transformers, in float32.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from rich.table import Table

from benchmarks.models import gguf_reference
from benchmarks.served import served
from benchmarks.texts import library_texts
from isthmus.bench import BenchError
from isthmus.bench.serve import BEAT_S
from isthmus.live.engine.spec import kv_layout, read_spec
from isthmus.live.gateway.tokenizer import GatewayTokenizer

BLOCK_SIZE = 16
DTYPE = "float32"
Roles = dict[str, Any]


class Plan(msgspec.Struct, frozen=True):
    """`model`: a folder or GGUF file. `tokens`: that each node has KV memory for; `nodes`: of each cluster; `answer`:
    in tokens."""

    model: Path
    tokens: int = 512
    nodes: tuple[int, ...] = (1, 4)
    answer: int = 16
    threads: int = 1


class Row(msgspec.Struct, frozen=True):
    """One cluster. `longest`: prompt and answer that were taken, where `longest + 1` were not, with the words of
    `refusal`. `asked`: how often nodes were asked for attention; `equal`: tokens of the answer that are those of
    transformers."""

    nodes: int
    longest: int
    refusal: str
    seconds: float
    asked: int
    answer: int
    equal: int


def run(plan: Plan, report: Callable[[str], None] = lambda line: None) -> list[Row]:
    """Raises BenchError."""
    if plan.answer < 1 or plan.tokens < 4 * BLOCK_SIZE or plan.answer * 2 > plan.tokens:
        raise BenchError("a node needs memory for 64 tokens, and for twice an answer")
    text = _text(plan.model)
    with tempfile.TemporaryDirectory(prefix="isthmus-context-") as name:
        rows = []
        for nodes in plan.nodes:
            row, prompt, tokens = asyncio.run(_Cluster(plan, Path(name), nodes, text).run())
            equal = sum([a == b for a, b in zip(tokens, likeliest(plan.model, prompt, tokens), strict=True)])
            rows.append(msgspec.structs.replace(row, equal=equal))
            report(_line(rows[-1]))
    return rows


class _Cluster:
    """So many nodes, each of which computes and lends."""

    def __init__(self, plan: Plan, home: Path, nodes: int, text: list[int]) -> None:
        self._plan, self._home, self._nodes, self._text = plan, home, nodes, text

    async def run(self) -> tuple[Row, list[int], list[int]]:
        """The prompt and the answer too; `equal` is yet to be found."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            served(self._config(), self._home / "serve.log") as (url, _),
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            async with session.get(f"{url}/v1/models") as reply:
                card = (await reply.json())["data"][0]
            longest, count = int(card["max_model_len"]), self._plan.answer
            body = {
                "model": card["id"], "max_tokens": count, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True,
            }  # fmt: skip
            refusal = await self._refused(session, url, body | {"prompt": self._prompt(longest + 1 - count)})
            prompt, began = self._prompt(longest - count), time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body | {"prompt": prompt}) as reply:
                found = await reply.json()
                if reply.status != 200:
                    raise BenchError(f"{longest} tokens were refused: {found}")
            took = time.perf_counter() - began
            await asyncio.sleep(BEAT_S)  # for what nodes count
            async with session.get(f"{url}/metrics") as reply:
                asked = _total(await reply.text(), "isthmus_attention_asked_total")
        row = Row(self._nodes, longest, refusal, took, asked, count, 0)
        return row, prompt, found["choices"][0]["token_ids"]

    @staticmethod
    async def _refused(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
        async with session.post(f"{url}/v1/completions", json=body) as reply:
            found = await reply.json()
            if reply.status != 400:
                raise BenchError(f"a longer request got status {reply.status}, not 400")
            return str(found["error"]["message"])

    def _prompt(self, length: int) -> list[int]:
        if length > len(self._text):
            raise BenchError(f"there is text for {len(self._text)} tokens, not for {length}")
        return self._text[:length]

    def _config(self) -> Path:
        plan = self._plan
        layout = kv_layout(read_spec(plan.model), DTYPE, BLOCK_SIZE)
        values = {
            "model": str(plan.model),
            "port": 0,
            "roles": {"prefill": 0, "decode": 0, "mixed": self._nodes},
            "engine": {
                "dtype": DTYPE,
                "threads": plan.threads,
                "block_size": BLOCK_SIZE,
                "max_sequences": 4,
                "kv_memory": plan.tokens // BLOCK_SIZE * layout.block_bytes + 4 * layout.state_bytes,
            },
            "cache": {"dram": 0},
            "limits": {"silence_s": 30},  # a machine that is measured is busy
        }
        path = self._home / f"{self._nodes}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path


def _text(model: Path) -> list[int]:
    return GatewayTokenizer.load(model).encode_text("\n\n".join(library_texts()))


def _total(metrics: str, name: str) -> int:
    values = [line.rsplit(" ", 1)[1] for line in metrics.splitlines() if line.startswith(name + "{")]
    return int(sum(map(float, values)))


def likeliest(model: Path, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """What transformers finds likeliest after the prompt and each token of the answer, in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if model.is_file():
        reference: Any = gguf_reference(model, "sdpa")
    else:
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        known = torch.tensor([[*prompt, *answer[:-1]]])
        [logits] = reference(known, logits_to_keep=len(answer)).logits
    return [int(token) for token in logits.argmax(-1)]


def _line(row: Row) -> str:
    return f"{row.nodes} nodes: {row.longest} tokens, {row.equal} of {row.answer} tokens as by transformers"


def table(plan: Plan, rows: Sequence[Row]) -> Table:
    found = Table(
        "nodes", "longest request", "/ first row", "answered in s", "questions", "tokens as by transformers",
        title=f"{plan.model.name} in {DTYPE}, KV memory for {plan.tokens} tokens on each node",
    )  # fmt: skip
    for row in rows:
        ratio = row.longest / rows[0].longest
        found.add_row(
            str(row.nodes), str(row.longest), f"{ratio:.2f}", f"{row.seconds:.1f}", str(row.asked),
            f"{row.equal} of {row.answer}",
        )  # fmt: skip
    return found
