"""Looks up names that stand for several servers: DNS names, and labels of pods in Kubernetes.

    dns+http://NAME:PORT                     each address of a name
    k8s://NAMESPACE/LABEL=VALUE:PORT         each pod with that label that is ready

Kubernetes is asked as a pod may: with its service account's token, over HTTPS that its cluster's authority has signed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import aiohttp
import msgspec

from isthmus.config import MANY_SERVERS, Kubernetes, kubernetes
from isthmus.live.messenger import address_of, split_address

MAX_ANSWER_BYTES = 32 << 20
"""Of Kubernetes: some thousand pods."""


class LookUpError(Exception):
    """Why a name could not be looked up, in one line."""


def names_several(entry: str) -> bool:
    """Whether an entry is looked up, and is no server's own URL."""
    return entry.startswith(MANY_SERVERS)


async def look_up(entry: str) -> tuple[str, ...]:
    """Returns the URLs that an entry stands for, in order. Raises LookUpError, TimeoutError."""
    scheme, _, rest = entry.partition("://")
    if scheme == "dns+http":
        found = await resolve(*split_address(rest))
    else:
        where, _, port = rest.rpartition(":")
        namespace, _, selector = where.partition("/")
        found = [address_of(ip, int(port)) for ip in await ready_pods(namespace, selector)]
    return tuple(sorted([f"http://{address}" for address in found]))


async def resolve(name: str, port: int) -> list[str]:
    """Returns the addresses of a name, with the port: those of IPv4 if there are any, since a server that has both has
    one of either. Raises LookUpError."""
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LookUpError(f"{name} cannot be resolved: {error.strerror or error}") from None
    of = {family: {str(address[0]) for each, *_, address in answers if each == family} for family in _FAMILIES}
    return [address_of(ip, port) for ip in of[socket.AF_INET] or of[socket.AF_INET6]]


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct):
    podIP: str = ""
    conditions: list[_Condition] = []


class _Metadata(msgspec.Struct):
    deletionTimestamp: str | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    status: _PodStatus

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests: one that is being deleted has a while to end those it has."""
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return ready and bool(self.status.podIP) and self.metadata.deletionTimestamp is None


class _Pods(msgspec.Struct):
    items: list[_Pod]


async def ready_pods(namespace: str, selector: str) -> list[str]:
    """Returns the addresses of the ready pods of a namespace that a label selector names. Raises LookUpError."""
    where = kubernetes()
    if where is None:
        raise LookUpError("k8s:// is for inside a cluster: there is no KUBERNETES_SERVICE_HOST here")
    try:
        answer = await _ask(where, f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": selector})
        pods = msgspec.json.decode(answer, type=_Pods).items
    except aiohttp.ClientResponseError as error:
        hint = "; its service account needs the verb list on pods" if error.status == 403 else ""
        raise LookUpError(f"Kubernetes answers HTTP {error.status}{hint}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise LookUpError(f"Kubernetes cannot be asked: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LookUpError(f"Kubernetes answers what is no list of pods: {error}") from None
    return [pod.status.podIP for pod in pods if pod.is_ready]


async def _ask(where: Kubernetes, path: str, query: dict[str, str]) -> bytes:
    """The files are read each time: Kubernetes renews the token."""
    folder = Path(where.folder)
    token = (folder / "token").read_text().strip()
    trusted = ssl.create_default_context(cafile=folder / "ca.crt")
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.get(
            f"https://{where.address}{path}", params=query, ssl=trusted, allow_redirects=False
        ) as answer,
    ):
        answer.raise_for_status()
        found = bytearray()
        async for chunk in answer.content.iter_any():
            found += chunk
            if len(found) > MAX_ANSWER_BYTES:
                raise LookUpError(f"Kubernetes answers more than {MAX_ANSWER_BYTES} bytes; name fewer pods")
        if answer.status != 200:
            raise LookUpError(f"Kubernetes answers HTTP {answer.status}")
        return bytes(found)
