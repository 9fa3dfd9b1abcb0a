"""Servers alone on this machine, one after the other, under a client that nobody here wrote: `vllm bench serve`.

Ours beside vLLM with the same folder in bfloat16, and ours beside llama.cpp with the same GGUF file. A round starts
each of them in turn, warms it up and gives it every row; what the client saved is kept in a folder, one file for each
round, server and row, and the table is made from those files. So a run that was cut short goes on where it was, and
more rounds can be added to it.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Option

from benchmarks.options import WORDS, WORDS_OF_SHELL, Rounds, ServeOptions, VllmPython
from benchmarks.served import Running, Side, isthmus, llama, running, vllm
from isthmus.bench import BenchError
from isthmus.bench.child import Foreign
from isthmus.bench.reuse_pairs import prose
from isthmus.bench.study import Outcome, Report, Spread, plain, silent, spread, table
from isthmus.core.errors import ConfigError
from isthmus.sheet import Sheet

# The rows.


class Random(msgspec.Struct, frozen=True):
    """Prompts of random tokens, `requests` in all, `concurrency` at a time; lengths in tokens."""

    prompt: int
    output: int
    concurrency: int
    requests: int

    @property
    def name(self) -> str:
        return f"{self.prompt}/{self.output}x{self.concurrency}"

    def fewer(self) -> Random:
        """Half as many requests, but a full house."""
        return msgspec.structs.replace(self, requests=max(self.concurrency, self.requests // 2))

    def dataset(self, model: Path, folder: Path, seed: int) -> list[str]:
        """Arguments of the client."""
        lengths = ("--random-input-len", str(self.prompt), "--random-output-len", str(self.output))
        return ["--dataset-name", "random", *lengths, "--seed", str(seed)]


class Chat(msgspec.Struct, frozen=True):
    """Conversations of `turns` turns, all with the same beginning, replayed: each prompt is the one before it with
    a recorded answer and a new question. First turns of all of them go first, then second ones, and so on."""

    conversations: int
    turns: int
    output: int
    concurrency: int

    name = "chat"

    @property
    def requests(self) -> int:
        return self.conversations * self.turns

    def fewer(self) -> Chat:
        """Half as many conversations, but enough that none has two turns under way."""
        return msgspec.structs.replace(self, conversations=max(self.concurrency + 2, self.conversations // 2))

    def dataset(self, model: Path, folder: Path, seed: int) -> list[str]:
        """Writes the prompts for the client, and answers with its arguments."""
        file = folder / f"chat-{seed}.jsonl"
        prompts = render(model, self.messages(seed))
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        length = ("--custom-output-len", str(self.output), "--skip-chat-template", "--disable-shuffle")
        return ["--dataset-name", "custom", "--dataset-path", str(file), *length, "--seed", str(seed)]

    def messages(self, seed: int) -> list[list[dict[str, str]]]:
        """Of each request in the order of sending. Texts are real, and no two conversations share one."""
        texts = [text for passage in prose(None) if len(text := " ".join(passage)) < 300]
        random.Random(seed).shuffle(texts)
        drawn = iter(texts)
        talks = [[{"role": "system", "content": " ".join(next(drawn) for _ in range(4))}]] * self.conversations
        requests = []
        for _ in range(self.turns):
            talks = [[*talk, {"role": "user", "content": next(drawn)}] for talk in talks]
            requests += talks
            talks = [[*talk, {"role": "assistant", "content": next(drawn)}] for talk in talks]
        return requests


Row = Random | Chat

ROWS: tuple[Row, ...] = (
    Random(64, 128, 1, 8),
    Random(64, 128, 8, 24),
    Random(64, 128, 16, 32),
    Random(512, 64, 16, 32),
    Random(3000, 16, 1, 4),
    Chat(conversations=10, turns=4, output=48, concurrency=4),
)
WARM_UP: tuple[Row, ...] = (Random(64, 16, 16, 16), Random(3000, 4, 1, 1))
"""Given to each server after its start, and not counted."""


def rows_named(names: Sequence[str]) -> list[Row]:
    """Raises BenchError for a name that no row has."""
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise BenchError(f"no row is named {unknown[0]}; there are {', '.join(known)}")
    return [known[name] for name in names]


def render(model: Path, talks: Sequence[list[dict[str, str]]]) -> list[str]:
    """As the chat template of the model's folder has it, up to where the answer begins."""
    from transformers import AutoTokenizer

    template: Any = AutoTokenizer.from_pretrained(model).apply_chat_template
    return [template(talk, tokenize=False, add_generation_prompt=True) for talk in talks]


def special_tokens(model: Path) -> list[int]:
    """Ids of the tokens that are no text, those that end an answer among them."""
    from transformers import AutoTokenizer

    added = AutoTokenizer.from_pretrained(model).added_tokens_decoder
    return [token for token, entry in added.items() if entry.special]


# What was measured.


class Figures(msgspec.Struct, frozen=True):
    """Of one server, row and round, as the client saved them: output tokens a second, mean TTFT, mean time per
    token after the first."""

    output_throughput: float
    mean_ttft_ms: float
    mean_tpot_ms: float
    completed: int
    total_output_tokens: int


class Result(msgspec.Struct, frozen=True):
    """One server and row. `tokens`: output tokens of a request, in the mean over all rounds."""

    row: str
    side: str
    rounds: int
    tokens: float
    tokens_per_s: Spread
    ttft_ms: Spread
    tpot_ms: Spread


class Pair(msgspec.Struct, frozen=True):
    """Ours and a peer with the same weights, and the rows both are given. `model`: a folder whose tokenizer and
    chat template the client takes."""

    title: str
    model: Path
    ours: Side
    peer: Side
    rows: tuple[Row, ...]


# A run.


@dataclass(frozen=True)
class Plan:
    model: Annotated[Path, Option(help="Model folder in bfloat16.")]
    vllm_python: VllmPython
    folder: Annotated[
        Path, Option(help="Where logs and what the client saved are kept; goes on if it is there.")
    ]
    gguf: Annotated[Path | None, Option(help="The model as a GGUF file, for llama.cpp and ours.")] = None
    llama_python: Annotated[str | None, Option(help="A Python with llama-cpp-python[server].")] = None
    rounds: Rounds = 3
    rows: Annotated[tuple[str, ...], WORDS, Option(help="Some of the rows, e.g. 64/128x8,chat.")] = tuple(
        row.name for row in ROWS
    )
    options: ServeOptions = ()
    vllm_options: Annotated[tuple[str, ...], WORDS_OF_SHELL, Option(help="More options of vLLM's server.")] = ()
    llama_options: Annotated[
        tuple[str, ...], WORDS_OF_SHELL, Option(help="More options of llama.cpp's server.")
    ] = ()


def run(plan: Plan, report: Report = silent) -> Outcome:
    """Ours beside vLLM, and beside llama.cpp, each alone and in turns, under `vllm bench serve`."""
    if (plan.gguf is None) != (plan.llama_python is None):
        raise ConfigError("--gguf and --llama-python go together")
    rows = tuple(rows_named(plan.rows))
    peer = vllm(plan.vllm_python, plan.model, plan.vllm_options)
    pairs = [Pair("bfloat16", plan.model, isthmus("isthmus", plan.model, plan.options), peer, rows)]
    if plan.gguf is not None and plan.llama_python is not None:
        peer = llama(plan.llama_python, plan.gguf, special_tokens(plan.model), plan.llama_options)
        ours, half = isthmus("isthmus-gguf", plan.gguf, plan.options), tuple(row.fewer() for row in rows)
        pairs.append(Pair(plan.gguf.name, plan.model, ours, peer, half))
    found = measure(pairs, plan.vllm_python, plan.folder, plan.rounds, report)
    notes = [line for pair in pairs for line in verdicts(pair, found)]
    return Outcome([table_of(pair, found) for pair in pairs], plain(found), notes)


def measure(pairs: Sequence[Pair], python: str, folder: Path, rounds: int, report: Report) -> list[Result]:
    """`python`: an interpreter with vLLM, for the client. Raises BenchError, StartError."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_plan(folder / "plan.json", pairs)
    script = Path(__file__).with_name("peers") / "vllm_client.py"
    with contextlib.closing(Foreign(python, script)) as client:
        for number in range(1, rounds + 1):
            for pair in pairs:
                for side in (pair.ours, pair.peer):
                    _measure(client, pair, side, folder / f"round-{number}", number, report)
    return results(pairs, folder)


def _check_plan(file: Path, pairs: Sequence[Pair]) -> None:
    """Files of servers that were started in another way are not to be mixed with these."""
    plan = [[side.name, *side.command] for pair in pairs for side in (pair.ours, pair.peer)]
    if file.exists():
        before = {line[0]: line for line in json.loads(file.read_text())}
        if changed := [line[0] for line in plan if before.get(line[0], line) != line]:
            raise BenchError(f"{file.parent} holds measurements of another {changed[0]}; name another folder")
        plan = list((before | {line[0]: line for line in plan}).values())
    file.write_text(json.dumps(plan, indent=1))


def _measure(client: Foreign, pair: Pair, side: Side, folder: Path, number: int, report: Report) -> None:
    """One server's turn: every row that it has no file of yet."""
    here = folder / side.name
    here.mkdir(parents=True, exist_ok=True)
    if not (missing := [row for row in pair.rows if not _file(here, row).exists()]):
        return
    report(f"round {number}: starting {side.name}")
    with running(side, here / "server.log") as server:
        report(f"round {number}: {side.name} was ready after {server.ready_s:.1f} s")
        for row in WARM_UP:
            _ask(client, pair.model, side, server, row, here / "warm-up.json", 0)
        for row in missing:
            seed = 1000 * number + [each.name for each in ROWS].index(row.name)
            _ask(client, pair.model, side, server, row, _file(here, row), seed)
            found = read(_file(here, row))
            report(
                f"round {number}: {side.name} {row.name}: {found.output_throughput:.1f} tokens/s, "
                f"TTFT {found.mean_ttft_ms:.0f} ms, {found.mean_tpot_ms:.1f} ms a token"
            )


def _file(folder: Path, row: Row) -> Path:
    return folder / f"{row.name.replace('/', '-')}.json"


def _ask(client: Foreign, model: Path, side: Side, server: Running, row: Row, file: Path, seed: int) -> None:
    """Gives the row to the server. The file is there only if every request was answered."""
    part = file.with_suffix(".part")
    arguments = [
        *("--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--tokenizer", str(model), "--ignore-eos", "--disable-tqdm"),
        *("--num-prompts", str(row.requests), "--max-concurrency", str(row.concurrency)),
        *("--save-result", "--result-dir", str(part.parent), "--result-filename", part.name),
        *(("--extra-body", json.dumps(side.extra)) if side.extra else ()),
        *row.dataset(model, file.parent, seed),
    ]
    log = file.parent / "client.log"
    client.ask(arguments, str(log))
    completed = read(part).completed
    if completed != row.requests:
        raise BenchError(
            f"{row.requests - completed} of {row.requests} requests of {row.name} failed; see {log}"
        )
    part.replace(file)


# The table.


def read(file: Path) -> Figures:
    """Raises BenchError for a file that the client did not write."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Figures)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{file}: is no result of vllm bench serve: {error}") from None


def results(pairs: Sequence[Pair], folder: Path) -> list[Result]:
    """Of all rounds that the folder holds, by pair, row and side."""
    return [
        result_of(row.name, side.name, found)
        for pair in pairs
        for row in pair.rows
        for side in (pair.ours, pair.peer)
        if (found := [read(file) for file in sorted(folder.glob(f"round-*/{side.name}/{_file(Path(), row)}"))])
    ]


QUANTITIES = {"tokens/s": "tokens_per_s", "mean TTFT ms": "ttft_ms", "ms a token": "tpot_ms"}
"""Of a `Result`. More of the first is better, less of the others."""


def result_of(row: str, side: str, found: Sequence[Figures]) -> Result:
    return Result(
        row,
        side,
        len(found),
        sum(each.total_output_tokens for each in found) / sum(each.completed for each in found),
        spread([each.output_throughput for each in found]),
        spread([each.mean_ttft_ms for each in found]),
        spread([each.mean_tpot_ms for each in found]),
    )


def table_of(pair: Pair, found: Sequence[Result]) -> Sheet:
    """Medians over the rounds, and the least and the most of them."""
    lines = []
    for row, ours, peer in _compared(pair, found):
        lines.append({"row": row})
        for side, result in ((pair.ours, ours), (pair.peer, peer)):
            lines[-1] |= {
                f"{head}, {side.name}": str(getattr(result, name)) for head, name in QUANTITIES.items()
            }
    names = [f"{head}, {side.name}" for head in QUANTITIES for side in (pair.ours, pair.peer)]
    return table(pair.title, {"prompt / output × concurrency": "row"} | {name: name for name in names}, lines)


def _compared(pair: Pair, found: Sequence[Result]) -> Iterator[tuple[str, Result, Result]]:
    """Rows that both sides have."""
    by_name = {(each.row, each.side): each for each in found}
    for row in pair.rows:
        ours, peer = (by_name.get((row.name, side.name)) for side in (pair.ours, pair.peer))
        if ours is not None and peer is not None:
            yield row.name, ours, peer


def verdicts(pair: Pair, found: Sequence[Result]) -> list[str]:
    """A line for each row in which ours is not ahead everywhere, and for answers that ended early."""
    lines = []
    for row, ours, peer in _compared(pair, found):
        behind = []
        for head, name in QUANTITIES.items():
            mine, other = getattr(ours, name), getattr(peer, name)
            sign = 1 if name == "tokens_per_s" else -1
            if sign * mine.median <= sign * other.median:
                behind.append(f"{head} {mine} against {other}")
        if behind:
            lines.append(f"{row}: not ahead of {peer.side} in {', '.join(behind)}")
        if ours.tokens != peer.tokens:
            lines.append(f"{row}: tokens of an answer {ours.tokens:.1f}, of {peer.side} {peer.tokens:.1f}")
    return lines
