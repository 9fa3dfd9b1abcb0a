"""Runs the choices of one request side by side, until all have ended or something stops them.

Every way out cancels the streams that have not ended: a stop string, an error of any choice, a client that
goes away, the shutdown of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import Receive

from isthmus.core.errors import ProtocolError
from isthmus.live.gateway.choice import Choice, Delta
from isthmus.live.gateway.client import ClientGoneError, gone
from isthmus.live.gateway.metrics import ChoiceTimer

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
