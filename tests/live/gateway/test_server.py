"""HTTPS for clients, new certificates without a restart, and room for connections."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError, StartError
from isthmus.live.gateway import GatewayTokenizer, create_app
from isthmus.live.gateway.server import LOOK_S, Certificate, connections_within
from isthmus.live.gateway.settings import GatewaySettings, HttpLimits
from isthmus.live.gateway.tenants import Phase
from tests.certificates import make_certificate

from .fake import FakeBackend
from .server import START_TIMEOUT_S, Client, Front, fronted, get, post, trusting


def served(
    backend: FakeBackend, tokenizer: GatewayTokenizer, certificate: Certificate, **limits: int
) -> AbstractContextManager[Front]:
    settings = GatewaySettings(http=HttpLimits(**{"header_s": 1000, **limits}))
    return fronted(create_app(backend, tokenizer, settings), certificate)


def dial(front: Front, authority: str) -> Client:
    plain = socket.create_connection(("127.0.0.1", front.port), timeout=START_TIMEOUT_S)
    return Client(trusting(authority).wrap_socket(plain))


def shown_by(front: Front) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", front.port), timeout=START_TIMEOUT_S) as plain,
        context.wrap_socket(plain) as secured,
    ):
        found = secured.getpeercert(binary_form=True)
        assert found
        return found


def test_https_answers_streams_and_refuses_as_http_does(
    backend: FakeBackend, tokenizer: GatewayTokenizer, tmp_path: Path
) -> None:
    files = make_certificate(tmp_path, "one")
    asked = {"model": "acme/tiny", "prompt": "hi", "stream": True}
    with served(backend, tokenizer, Certificate(files["certificate"], files["key"])) as front:
        client = dial(front, files["authority"])
        assert isinstance(client.socket, ssl.SSLSocket) and client.socket.version() == "TLSv1.3"
        client.send(post("/v1/completions", asked))
        (answer,) = client.answers()
        assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")
        client = dial(front, files["authority"])
        client.send(b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000)
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
        client.socket.close()


def test_what_is_no_handshake_is_counted_and_ended(
    backend: FakeBackend, tokenizer: GatewayTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificate(tmp_path, "one")
    with served(backend, tokenizer, Certificate(files["certificate"], files["key"])) as front:
        noise = front.connect(b"GET /health HTTP/1.1\r\n\r\n")
        assert noise.is_cut_off()
        silent = front.connect()
        front.wait_for(Phase.HEADERS)
        front.later(1001)
        assert silent.is_cut_off()
        front.wait_for(Phase.HEADERS, 0)
    assert not caplog.records


def test_half_handshakes_make_room(backend: FakeBackend, tokenizer: GatewayTokenizer, tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    certificate = Certificate(files["certificate"], files["key"])
    with served(backend, tokenizer, certificate, connections=4) as front:
        halves = [front.connect(b"\x16\x03\x01") for _ in range(30)]
        client = dial(front, files["authority"])
        client.send(get("/health"))
        assert [answer.status for answer in client.answers()] == [200]
        assert halves[0].is_cut_off()
        for half in halves[1:]:
            half.socket.close()


def test_new_files_are_shown_without_a_restart(
    backend: FakeBackend, tokenizer: GatewayTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "two")
    shown, key = tmp_path / "shown.pem", tmp_path / "key.pem"

    def put(source: str, target: Path) -> None:
        shutil.copy(source, tmp_path / "new")
        os.replace(tmp_path / "new", target)

    put(one["certificate"], shown), put(one["key"], key)
    certificate = Certificate(str(shown), str(key))
    first = der(one["certificate"])
    with served(backend, tokenizer, certificate) as front:
        assert shown_by(front) == first
        kept = dial(front, one["authority"])
        put(two["certificate"], shown)  # the key is still the other's
        front.call(lambda: certificate.renew(certificate._looked_s + LOOK_S))
        assert shown_by(front) == first
        assert "stays the earlier one" in caplog.text and str(shown) in caplog.text
        put(two["key"], key)
        front.call(lambda: certificate.renew(certificate._looked_s + LOOK_S))
        assert shown_by(front) == der(two["certificate"])
        kept.send(get("/health"))
        assert [answer.status for answer in kept.answers()] == [200]


def der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def test_files_that_cannot_be_used_are_one_clear_line(tmp_path: Path) -> None:
    one, two = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "two")
    (tmp_path / "empty").write_text("")
    locked = str(tmp_path / "locked")
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", one["key"], "-out", locked, "-passout", "pass:x"], check=True
    )
    wrong = [
        (str(tmp_path / "none"), one["key"], "cannot be read: No such file"),
        (one["certificate"], str(tmp_path / "none"), "cannot be read: No such file"),
        (one["certificate"], two["key"], "the key is another certificate's"),
        (str(tmp_path / "empty"), one["key"], "no certificate, or no key, in PEM form"),
        (one["certificate"], str(tmp_path / "empty"), "no certificate, or no key, in PEM form"),
        (one["certificate"], locked, "the key is encrypted; give one that is not"),
    ]
    for certificate, key, words in wrong:
        with pytest.raises(ConfigError) as refused:
            Certificate(certificate, key)
        assert words in str(refused.value) and "\n" not in str(refused.value)


def test_connections_leave_descriptors_for_nodes() -> None:
    assert connections_within(1024, 2, None) == 1024 - 256 - 16
    assert connections_within(65_536, 2, None) == 16_384
    assert connections_within(65_536, 2, 20_000) == 20_000
    assert connections_within(1024, 2, 10) == 10


@pytest.mark.parametrize(("descriptors", "asked"), [(1024, 753), (280, None)])
def test_what_does_not_fit_is_said(descriptors: int, asked: int | None) -> None:
    with pytest.raises(StartError, match=r"limits.connections\) do not fit in .* descriptors"):
        connections_within(descriptors, 2, asked)


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """In a process of its own: a limit cannot be taken back."""
    script = (
        "import resource; from isthmus.live.gateway.server import raise_descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000)); print(raise_descriptors()); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 1000 or hard == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "1000"]
