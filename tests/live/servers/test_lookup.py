"""Names of several servers: DNS, and pods of a Kubernetes whose API server is a fake one, over TLS."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from isthmus import config
from isthmus.live.servers import lookup
from isthmus.live.servers.lookup import LookUpError, look_up
from tests.certificates import make_certificate

ENTRY = "k8s://serving/app.kubernetes.io/name=vllm,tier=gpu:8000"


def pod(ip: str | None, *, ready: str = "True", leaving: bool = False) -> dict[str, Any]:
    """As Kubernetes writes one, with much that is not read."""
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": "vllm-0", "labels": {"tier": "gpu"}}
        | ({"deletionTimestamp": "2026-11-26T10:00:00Z"} if leaving else {}),
        "spec": {"containers": [{"image": "vllm"}]},
        "status": {"phase": "Running", "conditions": conditions} | ({"podIP": ip} if ip else {}),
    }


class Kubernetes:
    """An API server that asks for its token, and keeps what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        self.files = make_certificate(folder, "kubernetes")
        self.pods: list[dict[str, Any]] = []
        self.status, self.body = 200, b""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.be_trusted(self.files["authority"])
        self.give_token("of-pod")
        self._patch.setattr(config, "SERVICE_ACCOUNT", str(folder))

    def be_trusted(self, authority: str) -> None:
        (self.folder / "ca.crt").write_bytes(Path(authority).read_bytes())

    def give_token(self, token: str) -> None:
        self.token = token
        (self.folder / "token").write_text(f"{token}\n")

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        self.asked.append((request.path, dict(request.query)))
        body = self.body or json.dumps({"kind": "PodList", "items": self.pods}).encode()
        return web.Response(body=body, status=self.status, headers={"Location": "https://elsewhere/"})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(self.files["certificate"], self.files["key"])
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
            self._patch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            self._patch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
            yield
        finally:
            await runner.cleanup()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT_HTTPS", raising=False)
    return Kubernetes(tmp_path, monkeypatch)


def test_pods_that_are_ready_are_servers(cluster: Kubernetes) -> None:
    async def test() -> None:
        async with cluster.serving():
            assert await look_up(ENTRY) == ()
            cluster.pods = [
                pod("10.0.0.2"), pod("10.0.0.1"), pod(None), pod("10.0.0.3", ready="False"),
                pod("10.0.0.4", leaving=True), pod("fd00::1"),
            ]  # fmt: skip
            cluster.give_token("a later one")
            assert await look_up(ENTRY) == (
                "http://10.0.0.1:8000",
                "http://10.0.0.2:8000",
                "http://[fd00::1]:8000",
            )
        selector = {"labelSelector": "app.kubernetes.io/name=vllm,tier=gpu"}
        assert cluster.asked == [("/api/v1/namespaces/serving/pods", selector)] * 2

    asyncio.run(test())


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (403, b"", "Kubernetes answers HTTP 403; its service account needs the verb list on pods"),
        (302, b"", "Kubernetes answers HTTP 302"),
        (500, b"", "Kubernetes answers HTTP 500"),
        (200, b"[]", "Kubernetes answers what is no list of pods: "),
        (200, b'{"items": [{"metadata": {}, "status": {"podIP": 5}}]}', "what is no list of pods: "),
        (200, b'{"items": ' + b"[" * 100_000, "what is no list of pods: "),
        (200, b'{"a": "' + b"a" * 5000 + b'"}', "Kubernetes answers more than 4096 bytes"),
    ],
)  # fmt: skip
def test_another_answer_is_told_in_one_line(
    cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, says: str
) -> None:
    monkeypatch.setattr(lookup, "MAX_ANSWER_BYTES", 1 << 20 if len(body) > 10_000 else 1 << 12)

    async def test() -> None:
        async with cluster.serving():
            cluster.status, cluster.body = status, body
            with pytest.raises(LookUpError, match=re.escape(says)) as caught:
                await look_up(ENTRY)
            assert "\n" not in str(caught.value) and len(cluster.asked) == 1

    asyncio.run(test())


def test_the_token_goes_to_nobody_whom_the_authority_does_not_know(cluster: Kubernetes, tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "other").mkdir()
        cluster.be_trusted(make_certificate(tmp_path / "other", "kubernetes")["authority"])
        async with cluster.serving():
            with pytest.raises(LookUpError, match=r"Kubernetes cannot be asked: .*certificate"):
                await look_up(ENTRY)
        assert not cluster.asked

    asyncio.run(test())


def test_outside_a_cluster_there_are_no_pods(
    cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LookUpError, match="there is no KUBERNETES_SERVICE_HOST here"):
        asyncio.run(look_up(ENTRY))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    (tmp_path / "token").unlink()
    with pytest.raises(LookUpError, match=r"Kubernetes cannot be asked: .*token"):
        asyncio.run(look_up(ENTRY))


def test_a_name_of_dns_is_its_addresses() -> None:
    async def test() -> None:
        assert await look_up("dns+http://localhost:81") == ("http://127.0.0.1:81",)
        with pytest.raises(LookUpError, match=r"nowhere\.invalid cannot be resolved"):
            await look_up("dns+http://nowhere.invalid:81")

    asyncio.run(test())
