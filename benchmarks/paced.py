"""The set pace of a fake server, and what it has cached: `benchmarks.paced_server` without its HTTP.

`Server` owns the prompts that wait, the one that is computed and the answers that run; it knows a connection only as an
`Outlet`. The rest are values of text: its tokens, and names of its blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

TOKEN_CHARS = 4
BLOCK_TOKENS = 16
WORDS = [f" {word}" for word in "ark bay cob den elm fir gem hut ivy jar key log map net oak pit".split()]


@dataclass(frozen=True)
class Pace:
    """How quick the server is, and how much it keeps."""

    blocks: int = 384
    token_ms: float = 5.0
    prefill_us: float = 100.0
    delay_s: float = 0.0
    model: str = "paced"
    max_model_len: int = 131_072


class Blocks:
    """Names of cached blocks in the order of their last use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def matched(self, names: Sequence[int]) -> int:
        """So many blocks at the beginning of a prompt are cached. Changes nothing."""
        return next((at for at, name in enumerate(names) if name not in self._kept), len(names))

    def use(self, names: Sequence[int]) -> None:
        """Keeps these blocks as the most recently used; the end of a prompt goes before its beginning."""
        for name in reversed(names):
            self._kept[name] = None
            self._kept.move_to_end(name)
        while len(self._kept) > self.limit:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


def named(text: str) -> list[int]:
    """Names of the full blocks of a prompt. Each depends on all blocks before it."""
    size = BLOCK_TOKENS * TOKEN_CHARS
    names, parent = [], 0
    for start in range(0, len(text) - size + 1, size):
        parent = hash((parent, text[start : start + size]))
        names.append(parent)
    return names


def length_of(text: str) -> int:
    """Tokens of a prompt."""
    return -(-len(text) // TOKEN_CHARS)


def tokens_of(text: str) -> list[int]:
    """Tokens of a text, by number: its characters."""
    data = text.encode("latin-1", "replace")
    return [int.from_bytes(data[at : at + TOKEN_CHARS], "little") for at in range(0, len(data), TOKEN_CHARS)]


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens. Raises OverflowError for a number that is none."""
    return b"".join([each.to_bytes(TOKEN_CHARS, "little").rstrip(b"\0") for each in tokens]).decode("latin-1")


def rendered(messages: Sequence[dict[str, Any]]) -> str:
    """The prompt of a chat, which begins with the prompts and answers of its earlier turns."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        parts.append(f"<|{message['role']}|>\n{content}\n")
    return "".join(parts) + "<|assistant|>\n"


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def next_word(seed: int) -> tuple[str, int]:
    """The word after a text of that seed, and the seed of both: a function of all the text before, as in a model."""
    word = WORDS[seed >> 16 & 15]
    return word, zlib.crc32(word.encode(), seed)


def answer_to(text: str, tokens: int) -> str:
    """What each server says to a prompt."""
    seed, said = seed_of(text), ""
    for _ in range(tokens):
        word, seed = next_word(seed)
        said += word
    return said


@dataclass
class Faults:
    """What goes wrong next; `POST /fault` sets it."""

    fail: int = 0
    status: int = 500
    hang: int = 0
    cut: int = 0
    after: int = 0
    slow_s: float = 0.0

    def took(self, name: str) -> bool:
        """Whether one of these is left; then it is one less."""
        left = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


class Outlet(Protocol):
    """Where an answer goes. `answer`: the one that it waits for; None once its client has gone."""

    answer: Answer | None

    def begin(self, answer: Answer, number: int) -> None:
        """The prompt is computed; tokens follow."""

    def token(self, answer: Answer, is_last: bool) -> None:
        """The last token of `said` is new."""

    def cut(self) -> None:
        """The answer breaks off."""

    def error(self, status: int, message: str) -> None:
        """There is no answer."""


@dataclass(eq=False)
class Answer:
    """One answer that is asked for. `cut`: the tokens after which it breaks off."""

    connection: Outlet
    is_chat: bool
    is_stream: bool
    has_usage: bool
    has_ids: bool
    text: str
    limit: int
    cut: int | None = None
    cached: int = 0
    said: list[str] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    head: bytes = b""
    seed: int = 0
    timer: asyncio.TimerHandle | None = None


class Server:
    """Prompts that wait, the one that is computed, and the answers that run."""

    def __init__(self, pace: Pace) -> None:
        self.pace, self.blocks, self.faults = pace, Blocks(pace.blocks), Faults(slow_s=pace.delay_s)
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[Answer] = deque()
        self.prefilling: Answer | None = None
        self.running: dict[Answer, None] = {}
        self.delayed: dict[Answer, None] = {}
        self.counts = dict.fromkeys(("prompt_tokens", "hits", "answered", "aborted", "generation_tokens"), 0)
        self._ids = itertools.count()
        self._free_at = self._next_at = 0.0
        self._is_ticking = False

    # Facts.

    def metrics(self) -> str:
        pace, label = self.pace, f'{{engine="0",model_name="{self.pace.model}"}}'
        active = [*self.running, *([self.prefilling] if self.prefilling else [])]
        used = sum([-(-(length_of(each.text) + len(each.said)) // BLOCK_TOKENS) for each in active])
        lines = [
            f"vllm:num_requests_running{label} {len(active)}",
            f"vllm:num_requests_waiting{label} {len(self.waiting)}",
            f"vllm:kv_cache_usage_perc{label} {min(1.0, used / pace.blocks):.6f}",
            f"vllm:prefix_cache_queries_total{label} {self.counts['prompt_tokens']}",
            f"vllm:prefix_cache_hits_total{label} {self.counts['hits']}",
            f"vllm:prompt_tokens_total{label} {self.counts['prompt_tokens']}",
            f"vllm:generation_tokens_total{label} {self.counts['generation_tokens']}",
            f"vllm:request_success_total{label} {self.counts['answered']}",
            f"vllm:request_aborted_total{label} {self.counts['aborted']}",
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",enable_prefix_caching="True",engine="0",'
            f'num_gpu_blocks="{pace.blocks}"}} 1',
        ]
        kinds = [f"# TYPE {line.partition('{')[0]} gauge" for line in lines]
        return "".join(f"{kind}\n{line}\n" for kind, line in zip(kinds, lines, strict=True))

    # Answers.

    def ask(self, answer: Answer) -> None:
        """Takes an answer in; it comes in its time, or is a fault."""
        faults = self.faults
        if faults.took("fail"):
            answer.connection.error(faults.status, "a fault that was asked for")
            return
        if faults.took("hang"):
            return
        answer.cut = faults.after if faults.took("cut") else None
        if faults.slow_s:
            self.delayed[answer] = None
            answer.timer = self.loop.call_later(faults.slow_s, self._queue, answer)
        else:
            self._queue(answer)

    def drop(self, answer: Answer) -> None:
        """Its client has gone."""
        if answer.timer is not None and answer is not self.prefilling:
            answer.timer.cancel()
        known = answer in self.waiting or answer in self.running or answer in self.delayed
        if known or answer is self.prefilling:
            self.counts["aborted"] += 1
        if answer in self.waiting:
            self.waiting.remove(answer)
        self.running.pop(answer, None)
        self.delayed.pop(answer, None)

    def _queue(self, answer: Answer) -> None:
        self.delayed.pop(answer, None)
        self.waiting.append(answer)
        if self.prefilling is None:
            self._prefill()

    def _prefill(self) -> None:
        """Begins with the next prompt; the last token of a prompt is always computed."""
        while self.waiting and self.prefilling is None:
            answer = self.prefilling = self.waiting.popleft()
            answer.names = named(answer.text)
            tokens = length_of(answer.text)
            reusable = answer.names[: (tokens - 1) // BLOCK_TOKENS]
            matched = self.blocks.matched(reusable)
            answer.cached = matched * BLOCK_TOKENS
            self.blocks.use(reusable[:matched])
            self.counts["prompt_tokens"] += tokens
            self.counts["hits"] += answer.cached
            now = self.loop.time()
            self._free_at = max(now, self._free_at) + (tokens - answer.cached) * self.pace.prefill_us / 1e6
            if self._free_at - now < 0.0005:  # the loop's timers know milliseconds
                self._prefilled(answer)
            else:
                answer.timer = self.loop.call_at(self._free_at, self._computed, answer)

    def _computed(self, answer: Answer) -> None:
        self._prefilled(answer)
        self._prefill()

    def _prefilled(self, answer: Answer) -> None:
        self.prefilling = None
        self.blocks.use(answer.names)
        if answer.connection.answer is not answer:
            return  # its client has gone meanwhile
        answer.seed = seed_of(answer.text)
        answer.connection.begin(answer, next(self._ids))
        self.running[answer] = None
        self._token(answer)
        if self.running and not self._is_ticking:
            self._is_ticking = True
            self._next_at = self.loop.time()
            self._later()

    def _later(self) -> None:
        """Sets the next step of all running answers, by the clock and not by when the last one was done."""
        self._next_at = max(self._next_at + self.pace.token_ms / 1e3, self.loop.time())
        self.loop.call_at(self._next_at, self._step)

    def _step(self) -> None:
        for answer in list(self.running):
            self._token(answer)
        if self.running:
            self._later()
        else:
            self._is_ticking = False

    def _token(self, answer: Answer) -> None:
        word, answer.seed = next_word(answer.seed)
        answer.said.append(word)
        self.counts["generation_tokens"] += 1
        is_last = len(answer.said) >= answer.limit
        is_cut = answer.cut is not None and len(answer.said) > answer.cut
        if is_cut or is_last:
            self.running.pop(answer, None)
        if is_cut:
            answer.connection.cut()
            return
        if is_last:
            self.counts["answered"] += 1
            self.blocks.use(named(answer.text + "".join(answer.said)))
        answer.connection.token(answer, is_last)
