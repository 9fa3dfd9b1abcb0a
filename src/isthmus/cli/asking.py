"""How verbs ask a server that runs: one HTTP request, whose mistakes are one line."""

from __future__ import annotations

from isthmus.core.errors import ConfigError, RequestError, UnavailableError


def checked_url(option: str, url: str) -> str:
    """The base URL without a slash at its end. Raises ConfigError."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"{option} {url}: not a URL such as http://127.0.0.1:8000")
    return url.rstrip("/")


def ask(
    base: str, path: str, key: str | None, *, answer_s: float, who: str, keyed: str, body: bytes | None = None
) -> bytes:
    """The body of the answer to GET, or to POST of `body`. Goes to the address directly, past any proxy; the `key` goes
    nowhere else, whatever the answer says. Hints: `who` should be there, and where a key comes from that is `keyed`.
    Raises UnavailableError, or RequestError with the server's own words where it refuses a body."""
    from http.client import HTTPException
    from ssl import SSLCertVerificationError
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, Request, build_opener

    request = Request(f"{base}{path}", data=body)
    if key is not None:
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=answer_s) as reply:
            return bytes(reply.read())
    except HTTPError as error:
        with error:
            if body is not None and (said := _said(error.read(MAX_SAID_BYTES))):
                raise RequestError(f"{base}: {said}") from None
        hint = who if error.code != 401 else keyed
        raise UnavailableError(f"{base}{path} answers {error.code} {error.reason}; {hint}") from None
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, SSLCertVerificationError):
            raise UnavailableError(f"{base} is not trusted: {reason.verify_message}; {_AUTHORITY}") from None
        if isinstance(reason, TimeoutError):
            reason = f"no answer within {answer_s:g} s"
        elif isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror
        said = " ".join(str(reason).split())  # what is no HTTP is quoted, line ends and all
        raise UnavailableError(f"nothing answers at {base}: {said}; {who}") from None


MAX_SAID_BYTES = 1 << 16
_AUTHORITY = "name the file of its certificate's authority in SSL_CERT_FILE"


def _said(answer: bytes) -> str:
    """The message of an error in OpenAI's shape, in one line; "" of anything else."""
    import msgspec

    try:
        match msgspec.json.decode(answer):
            case {"error": {"message": str(message)}}:
                return " ".join(message.split())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return ""
