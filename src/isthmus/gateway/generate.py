"""The generation endpoints: parse, plan, submit, answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic

from starlette.types import Receive, Scope, Send

from isthmus.errors import IsthmusError
from isthmus.gateway.backend import Backend
from isthmus.gateway.choice import Choice, Delta, joined
from isthmus.gateway.flow import ClientGoneError, cancel_all, run
from isthmus.gateway.http import JSON_HEADERS, EventWriter, read_body, send_body
from isthmus.gateway.identity import hex_id
from isthmus.gateway.metrics import ChoiceTimer, Meter
from isthmus.gateway.prepare import PreparedRequest
from isthmus.gateway.problems import problem_json, status_of
from isthmus.gateway.requests import Body, parse_body
from isthmus.gateway.settings import GatewaySettings
from isthmus.gateway.stops import StopMatcher
from isthmus.gateway.terms import Terms, terms_of
from isthmus.gateway.tokenizer import GatewayTokenizer
from isthmus.gateway.wire import DONE, Dialect, event, usage_of

TimedChoices = list[tuple[Choice, ChoiceTimer]]


@dataclass(frozen=True)
class Service:
    """What every endpoint needs."""

    backend: Backend
    tokenizer: GatewayTokenizer
    settings: GatewaySettings
    meter: Meter


@dataclass(frozen=True)
class GenerationEndpoint(Generic[Body]):
    """An ASGI app for one endpoint: `kind` of body it reads, how it plans it, and how it writes the answer."""

    service: Service
    kind: type[Body]
    plan: Callable[[Body, str, Terms], Awaitable[PreparedRequest]]
    dialect: Callable[[PreparedRequest, Callable[[int], bytes]], Dialect]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises IsthmusError before the answer has begun; afterwards errors are part of the answer."""
        try:
            await self._serve(scope, receive, send)
        except ClientGoneError:
            self.service.meter.cancelled()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.perf_counter()
        body = await read_body(scope, receive, self.service.settings.max_body_bytes)
        prepared = await self.plan(parse_body(self.kind, body), hex_id(scope), terms_of(scope))
        dialect = self.dialect(prepared, self.service.tokenizer.token_bytes)
        answer = self._stream if prepared.stream else self._answer
        # From here to `run`, which cancels what is left, nothing may await or fail.
        choices = self._submit(prepared, arrival_s)
        running = self.service.meter.running
        running.inc(len(choices))
        try:
            await answer(prepared, choices, dialect, receive, send)
        finally:
            running.dec(len(choices))

    def _submit(self, prepared: PreparedRequest, arrival_s: float) -> TimedChoices:
        """Starts all jobs, or none. Raises what the backend raises."""
        started: dict[int, Choice] = {}
        try:
            for index, job in enumerate(prepared.jobs):
                stream = self.service.backend.submit(job)
                detokenizer = self.service.tokenizer.detokenizer()
                stops = StopMatcher(prepared.stops)
                started[index] = Choice(index, job, stream, detokenizer, stops)
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

    async def _answer(
        self, prepared: PreparedRequest, choices: TimedChoices, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        kept: list[list[Delta]] = [[] for _ in choices]

        async def keep(choice: Choice, delta: Delta) -> None:
            kept[choice.index].append(delta)

        await run(choices, keep, receive)
        finished = [(choice, joined(deltas)) for (choice, _), deltas in zip(choices, kept, strict=True)]
        body = dialect.reply(finished, usage_of(prepared, [choice for choice, _ in choices]))
        await send_body(send, body, JSON_HEADERS)

    async def _stream(
        self, prepared: PreparedRequest, choices: TimedChoices, dialect: Dialect, receive: Receive, send: Send
    ) -> None:
        writer = EventWriter(send)

        async def write(choice: Choice, delta: Delta) -> None:
            await writer.write(dialect.events(choice, delta))

        try:
            await run(choices, write, receive)
        except Exception as error:
            if not writer.started or isinstance(error, ClientGoneError):
                raise
            await writer.close(event(problem_json(error)))
            if not isinstance(error, IsthmusError):
                raise  # a bug of ours: the app counts it and the server logs it
            self.service.meter.failed(status_of(error))
            return
        usage = usage_of(prepared, [choice for choice, _ in choices])
        await writer.close((dialect.usage_event(usage) if prepared.include_usage else b"") + DONE)
