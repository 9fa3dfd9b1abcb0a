"""The generation endpoints: prepare, submit, and answer while all choices of a request run side by side.

Every way out cancels the streams that have not ended: a stop string, an error of any choice, a client that
goes away, the shutdown of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from isthmus.core.errors import IsthmusError, ProtocolError
from isthmus.core.types import Reuse
from isthmus.live.gateway.backend import Backend
from isthmus.live.gateway.choice import Choice, Delta, joined
from isthmus.live.gateway.detokenizer import StopMatcher
from isthmus.live.gateway.headers import hex_id, terms_of
from isthmus.live.gateway.http import (
    JSON_HEADERS,
    NOTE,
    STOPPING,
    ClientGoneError,
    EventWriter,
    gone,
    read_body,
    send_body,
    status_of,
)
from isthmus.live.gateway.metrics import ChoiceTimer, Meter
from isthmus.live.gateway.prepare import PreparedRequest
from isthmus.live.gateway.preparing import Preparing
from isthmus.live.gateway.settings import GatewaySettings
from isthmus.live.gateway.tenants import account_of
from isthmus.live.gateway.tokenizer import GatewayTokenizer
from isthmus.live.gateway.wire import Dialect, usage_of

Sink = Callable[[Choice, Delta], Awaitable[None]]


async def run(choices: Sequence[tuple[Choice, ChoiceTimer]], sink: Sink, receive: Receive) -> None:
    """Passes every delta of every choice to `sink`, as they come.

    Raises the first error of any choice or of `sink`, or ClientGoneError.
    """
    running = {choice.index: choice for choice, _ in choices}
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive, running))
            async with asyncio.TaskGroup() as followers:
                for choice, timer in choices:
                    followers.create_task(_follow(choice, timer, sink, running))
            watcher.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        cancel_all(running)


def cancel_all(running: dict[int, Choice]) -> None:
    """Cancels what still runs, once."""
    while running:
        running.popitem()[1].stream.cancel()


async def _follow(choice: Choice, timer: ChoiceTimer, sink: Sink, running: dict[int, Choice]) -> None:
    async for batch in choice.stream:
        if not batch:
            continue
        delta = choice.push(batch)
        timer.observe(delta)
        if delta.finish is not None:
            # Before the sink, which may wait for a slow client.
            del running[choice.index]
            if choice.stopped:
                choice.stream.cancel()
        await sink(choice, delta)
        if delta.finish is not None:
            return
    raise ProtocolError(f"{choice.job.request}: the cluster ended the answer without a finish reason")


async def _watch(receive: Receive, running: dict[int, Choice]) -> None:
    await gone(receive)
    cancel_all(running)
    raise ClientGoneError


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The error that answers the request. If the client is gone, nothing else matters."""
    error: BaseException = errors.subgroup(ClientGoneError) or errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


log = logging.getLogger(__name__)

TimedChoices = list[tuple[Choice, ChoiceTimer]]


@dataclass(frozen=True)
class Service:
    """What every endpoint needs."""

    backend: Backend
    tokenizer: GatewayTokenizer
    settings: GatewaySettings
    meter: Meter
    preparing: Preparing
    left_out: set[str] = field(default_factory=set)
    """Of any request so far."""


@dataclass(frozen=True)
class JsonEndpoint:
    """An ASGI app that answers a body with what the preparation `name` makes of it, at once and whole."""

    service: Service
    name: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises IsthmusError."""
        with suppress(ClientGoneError):
            body = await read_body(scope, receive, self.service.settings.max_body_bytes)
            answer = await self.service.preparing(self.name, body, hex_id(scope), terms_of(scope), receive)
            await send_body(send, answer, JSON_HEADERS)


@dataclass(frozen=True)
class GenerationEndpoint:
    """An ASGI app for one endpoint: the preparation `name` of its bodies, and how it writes the answer."""

    service: Service
    name: str
    dialect: Callable[[Any, Callable[[int], bytes]], Dialect]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises IsthmusError before the answer has begun; afterwards errors are part of the answer."""
        try:
            await self._serve(scope, receive, send)
        except ClientGoneError:
            self.service.meter.cancelled()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.perf_counter()
        body, terms = await read_body(scope, receive, self.service.settings.max_body_bytes), terms_of(scope)
        prepared = await self.service.preparing(self.name, body, hex_id(scope), terms, receive)
        account = account_of(scope)
        num_prompt = sum(map(len, prepared.prompts))
        if account is not None:
            account.check_prompt(num_prompt)
        dialect = self.dialect(prepared, self.service.tokenizer.token_bytes)
        if prepared.reuse is not Reuse.EXACT:
            await self.service.backend.ready_to_reuse()
        answer = self._stream if prepared.writing.stream else self._answer
        # From here to `run`, which cancels what is left, nothing may await or fail.
        choices = self._submit(prepared, arrival_s)
        running = self.service.meter.running
        running.inc(len(choices))
        if account is not None:
            account.spend(num_prompt, "prompt")
        try:
            await answer(prepared, choices, dialect, receive, send)
        finally:
            running.dec(len(choices))
            if account is not None:
                account.spend(sum([choice.num_tokens for choice, _ in choices]), "generation")

    def _submit(self, prepared: PreparedRequest, arrival_s: float) -> TimedChoices:
        """Starts all jobs, or none. Raises what the backend raises."""
        started: dict[int, Choice] = {}
        writing, markers = prepared.writing, prepared.tools.format.markers if prepared.tools else ()
        try:
            for index, job in enumerate(prepared.jobs):
                started[index] = Choice(
                    index,
                    job,
                    self.service.backend.submit(job),
                    self.service.tokenizer.detokenizer(
                        job.tokens, special=writing.shows_special, shown=markers
                    ),
                    StopMatcher(writing.stops, shown=writing.shows_stop),
                    prepared.tools.reader() if prepared.tools else None,
                    shows_end=writing.shows_stop,
                    silent=writing.only_echo,
                )
        except BaseException:
            cancel_all(started)
            raise
        meter, settings = self.service.meter, self.service.settings
        return [
            (
                choice,
                ChoiceTimer(meter, settings, choice, arrival_s=arrival_s, leads=choice.index % prepared.n == 0),
            )
            for choice in started.values()
        ]

    def _notes(self, prepared: PreparedRequest) -> list[tuple[bytes, bytes]]:
        """What tells the client, and once in the log the operator, of what was left out of a request."""
        for words in prepared.left_out:
            if words not in self.service.left_out:
                self.service.left_out.add(words)
                log.warning("of requests, %s is left out; answers say so (%s)", words, NOTE.decode())
        return [(NOTE, f"left out: {', '.join(prepared.left_out)}".encode())] if prepared.left_out else []

    async def _answer(
        self, prepared: PreparedRequest, choices: TimedChoices, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        kept: list[list[Delta]] = [[] for _ in choices]

        async def keep(choice: Choice, delta: Delta) -> None:
            kept[choice.index].append(delta)

        await run(choices, keep, receive)
        finished = [(choice, joined(deltas)) for (choice, _), deltas in zip(choices, kept, strict=True)]
        body = dialect.reply(finished, usage_of(prepared, [choice for choice, _ in choices]))
        await send_body(send, body, [*JSON_HEADERS, *self._notes(prepared)])

    async def _stream(
        self, prepared: PreparedRequest, choices: TimedChoices, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        writer = EventWriter(send, self._notes(prepared))

        writing, all_choices = prepared.writing, [choice for choice, _ in choices]

        async def write(choice: Choice, delta: Delta) -> None:
            usage = usage_of(prepared, all_choices) if writing.usage else None
            await writer.write(dialect.events(choice, delta, usage))

        try:
            await run(choices, write, receive)
            await writer.close(dialect.end(usage_of(prepared, all_choices)))
        except asyncio.CancelledError:  # the server ends
            if writer.started:
                await writer.close(dialect.failure(STOPPING))
            raise
        except Exception as error:
            if not writer.started or isinstance(error, ClientGoneError):
                raise
            await writer.close(dialect.failure(error))
            if not isinstance(error, IsthmusError):
                raise  # a bug of ours: the app counts it and the server logs it
            self.service.meter.failed(status_of(error))
