"""A cluster for tests: what it answers is scripted, and what the gateway cancels is recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import msgspec

from isthmus.core.blocks import KVLayout
from isthmus.core.types import FinishReason, Generated, Job, ModelCard, NodeId, Reused, Role, TokenLogprobs

from . import folder

CARD = ModelCard(name="acme/tiny", max_length=256, vocab_size=300, created_s=1_700_000_000)
ROOMY = msgspec.structs.replace(CARD, max_length=4096)

HANG = "hang"
"""A step that never ends: the stream waits until it is thrown away."""

Step = Sequence[Generated] | Exception | str
Script = Callable[[Job], Iterable[Step]]


class FakeStream:
    def __init__(self, backend: FakeBackend, job: Job, steps: Iterable[Step]) -> None:
        self._backend = backend
        self._job = job
        self._steps = steps

    async def __aiter__(self) -> AsyncIterator[Sequence[Generated]]:
        for step in self._steps:
            await asyncio.sleep(0)  # lets other choices take their turn, as a network would
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                await asyncio.get_running_loop().create_future()
            else:
                yield step

    def cancel(self) -> None:
        with self._backend.changed:
            self._backend.cancelled.append(self._job.request)
            self._backend.changed.notify_all()


class FakeBackend:
    """`script(job)`: the steps of its stream; an exception it raises is raised by `submit`."""

    def __init__(self, script: Script) -> None:
        self.card = CARD
        self.healthy = True
        self.script = script
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.changed = threading.Condition()
        self.node_gauges: dict[str, dict[str, float]] = {}
        self.refused: dict[str, int] = {}
        self.members: dict[NodeId, tuple[Role, KVLayout, str]] = {}
        self.multiplied: dict[NodeId, tuple[str, ...]] = {}
        self.remarked: dict[NodeId, str] = {}
        self.offloaded: Any = None
        self.waits_before_reuse: list[int] = []
        """How many jobs there were each time when it was asked to get ready."""
        self.not_ready: Exception | None = None

    def submit(self, job: Job) -> FakeStream:
        steps = self.script(job)
        with self.changed:
            self.jobs.append(job)
            self.changed.notify_all()
        return FakeStream(self, job, steps)

    async def ready_to_reuse(self) -> None:
        self.waits_before_reuse.append(len(self.jobs))
        await asyncio.sleep(0)
        if self.not_ready is not None:
            raise self.not_ready

    async def poll(self) -> None:
        """All is said."""

    def gauges(self) -> dict[str, dict[str, float]]:
        return self.node_gauges

    def nodes(self) -> dict[NodeId, tuple[Role, KVLayout, str]]:
        return self.members

    def products(self) -> dict[NodeId, tuple[str, ...]]:
        return self.multiplied

    def remarks(self) -> dict[NodeId, str]:
        return self.remarked

    def offload(self) -> Any:
        return self.offloaded

    def refusals(self) -> dict[str, int]:
        return self.refused

    def wait_asked(self, count: int, timeout_s: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.jobs) >= count, timeout_s)

    def wait_cancelled(self, count: int, timeout_s: float = 60) -> list[str]:
        """The requests cancelled, once there are `count` of them. Fails the test after `timeout_s`."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.cancelled) >= count, timeout_s), self.cancelled
            return list(self.cancelled)


def says(
    tokens: Sequence[int],
    finish: FinishReason | None = FinishReason.STOP,
    *,
    per_batch: int = 1,
    cached_tokens: int = 0,
    reused: Reused | None = None,
) -> list[Step]:
    """Steps that produce `tokens`, the last with `finish` (None: the stream goes on with what is added).

    Token t has log-probability -t/8, and the n most likely are 0 to n-1; both are asked for or not by the job,
    so they are put in by `with_logprobs`.
    """
    generated = [
        Generated(
            index=i,
            token=token,
            finish=finish if i == len(tokens) - 1 else None,
            cached_tokens=cached_tokens if i == 0 else None,
            reused=reused if i == 0 else None,
        )
        for i, token in enumerate(tokens)
    ]
    return [generated[i : i + per_batch] for i in range(0, len(generated), per_batch)]


def with_logprobs(steps: Iterable[Step], num_top: int) -> list[Step]:
    """The same steps, with log-probabilities as a model would send them: exact binary fractions."""
    top = tuple((token, -token / 8) for token in range(num_top))
    return [
        [msgspec.structs.replace(g, logprobs=TokenLogprobs(-g.token / 8, top)) for g in step]
        if not isinstance(step, str | Exception)
        else step
        for step in steps
    ]


def scored(steps: Sequence[Step], job: Job) -> list[Step]:
    """The same steps, with scores of the prompt if the job asks for them: token t has -t/8 and rank t."""
    if job.sampling.prompt_logprobs is None:
        return list(steps)
    top = tuple((token, -token / 8) for token in range(job.sampling.prompt_logprobs))
    scores = tuple(TokenLogprobs(-token / 8, top, token) for token in job.tokens[1:])
    [first, *others], *rest = steps
    assert isinstance(first, Generated)
    return [[msgspec.structs.replace(first, prompt_logprobs=scores), *others], *rest]


def fitting(job: Job) -> list[Step]:
    """A JSON object, with the scores that are asked for."""
    steps = scored(says([*b'{"name": "Bob", "age": 4}', folder.EOS]), job)
    return steps if job.sampling.logprobs is None else with_logprobs(steps, job.sampling.logprobs)
