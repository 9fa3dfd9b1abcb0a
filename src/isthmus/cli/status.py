"""`isthmus status`: what a running cluster does, what its caches hold, and how much they are used."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.live.gateway.status import Status

ANSWER_S = 5.0


def status(
    url: Annotated[str, typer.Option(help="Where the cluster serves HTTP.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, no table.")] = False,
    watch: Annotated[float | None, typer.Option(min=0.1, help="Again every so many seconds.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key; default: ISTHMUS_API_KEY.")] = None,
) -> None:
    """Show a running cluster: nodes, requests, KV memory, cache tiers, hit rates and KV between nodes."""
    from isthmus.cli.status_tables import status_sheets
    from isthmus.cli.tables import show
    from isthmus.config import api_key as key_of

    base = _checked(url)
    key = key_of("--api-key", api_key)
    if as_json:
        for answer in _answers(base, key, watch):
            _read(answer, base)
            print(answer.decode().strip(), flush=True)
    elif watch is not None and sys.stdout.isatty():
        _live(base, key, watch)
    else:
        for answer in _answers(base, key, watch):
            show(*status_sheets(_read(answer, base), base))
            sys.stdout.flush()


def _checked(url: str) -> str:
    """The base URL without a slash at its end. Raises ConfigError."""
    from urllib.parse import urlsplit

    from isthmus.core.errors import ConfigError

    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"--url {url}: not a URL such as http://127.0.0.1:8000")
    return url.rstrip("/")


def _answers(base: str, key: str | None, every_s: float | None) -> Iterator[bytes]:
    """One answer, or one every so many seconds until Ctrl-C."""
    yield _ask(base, key)
    try:
        while every_s is not None:
            time.sleep(every_s)
            yield _ask(base, key)
    except KeyboardInterrupt:
        return


def _live(base: str, key: str | None, every_s: float) -> None:
    """A screen of its own. A cluster that goes away, say to be restarted, is waited for."""
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    from isthmus.cli.status_tables import status_sheets
    from isthmus.core.errors import UnavailableError

    def now() -> RenderableType:
        sheets = status_sheets(_read(_ask(base, key), base), base)
        return Group(*(sheet.terminal() for sheet in sheets))

    shown = now()
    try:
        with Live(shown, console=Console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                try:
                    shown = now()
                except UnavailableError as error:
                    shown = Text(str(error))
                live.update(shown, refresh=True)
    except KeyboardInterrupt:
        return


def _ask(base: str, key: str | None) -> bytes:
    """The body of GET /status. Raises UnavailableError. Goes to the address directly, past any proxy; the key goes
    nowhere else, whatever the answer says."""
    from http.client import HTTPException
    from ssl import SSLCertVerificationError
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener

    from isthmus.core.errors import UnavailableError

    request = Request(f"{base}/status")
    if key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S) as reply:
            return bytes(reply.read())
    except HTTPError as error:
        error.close()
        hint = _WHOSE if error.code != 401 else _KEYED
        raise UnavailableError(f"{base}/status answers {error.code} {error.reason}; {hint}") from None
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, SSLCertVerificationError):
            raise UnavailableError(f"{base} is not trusted: {reason.verify_message}; {_AUTHORITY}") from None
        if isinstance(reason, TimeoutError):
            reason = f"no answer within {ANSWER_S:g} s"
        elif isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror
        said = " ".join(str(reason).split())  # what is no HTTP is quoted, line ends and all
        raise UnavailableError(f"nothing answers at {base}: {said}; {_WHOSE}") from None


def _read(answer: bytes, base: str) -> Status:
    """Raises UnavailableError when something else than this version's gateway answered."""
    import msgspec

    from isthmus.core.errors import UnavailableError
    from isthmus.live.gateway.status import Status

    try:
        return msgspec.json.decode(answer, type=Status)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnavailableError(f"{base}/status is not what this version reads: {error}; {_WHOSE}") from None


_AUTHORITY = "name the file of its certificate's authority in SSL_CERT_FILE"
_WHOSE = "is `isthmus serve` running there? (--url)"
_KEYED = "the server's key is needed: set ISTHMUS_API_KEY (or --api-key)"
