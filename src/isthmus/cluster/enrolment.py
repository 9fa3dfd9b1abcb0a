"""How a node gets the certificate that says its name: asked of the head over a session on which nothing else is heard,
after both have shown that they know the cluster's token; and later again, over the session that it then has.

    node, without a certificate                    head
    believes the key in its join token ── TLS ──>  shows a certificate of that key's, its own
                                  ── greeting ──   both know the token
                                     Enrol ──>     a request (PKCS 10): the node made the key and keeps it
                                 <── Enrolled      a certificate for `isthmus://CLUSTER/node/NAME`
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from isthmus.cluster import messages
from isthmus.cluster.sessions import NoPayloads
from isthmus.errors import ProtocolError, StartError
from isthmus.messenger import Network, Session
from isthmus.messenger.running import running_timeout
from isthmus.types import NodeId

if TYPE_CHECKING:
    from isthmus.cluster.authority import NodeCredentials


async def enrol(
    network: Network, join: str, credentials: NodeCredentials, node: NodeId, stage: int, timeout_s: float
) -> None:
    """Gets a first certificate. Raises OSError or TimeoutError when the head is not reached, StartError when it says
    no."""
    asking = _Asking()
    async with running_timeout(timeout_s):
        session = await network.connect(join, messages.NodeBound, asking, timeout_s=timeout_s, connections=1)
        try:
            session.send(messages.Enrol(node, stage, credentials.request()))
            answer = await asking.answer
        finally:
            session.close()
    try:
        credentials.take(answer.certificate, answer.authority)
    except ValueError as error:
        raise StartError(f"what the head at {join} answered cannot be used: {error}") from None


class _Asking(NoPayloads):
    """A session over which a certificate is awaited."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[messages.Enrolled] = asyncio.get_running_loop().create_future()

    def on_message(self, session: Session, message: Any) -> None:
        if self.answer.done():
            return
        if isinstance(message, messages.Enrolled):
            self.answer.set_result(message)
        elif isinstance(message, messages.Turned):
            self.answer.set_exception(StartError(f"the head turned this node away: {message.reason}"))
        else:
            raise ProtocolError(f"a {type(message).__name__} came in the place of a certificate")

    def on_close(self, session: Session, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionRefusedError(f"the head gave no certificate: {reason}"))
