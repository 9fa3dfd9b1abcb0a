"""Errors as OpenAI writes them, `{"error": {"message", "type", "param", "code"}}`, and their HTTP status."""

from __future__ import annotations

import math

import msgspec

from isthmus.core.errors import IsthmusError, OverloadedError, RequestError, UnavailableError


class UnknownModelError(RequestError):
    http_status = 404

    def __init__(self, name: str, served: str) -> None:
        message = f"The model {name!r} does not exist; this server serves {served!r}"
        super().__init__(message, param="model", code="model_not_found")


class UnknownRouteError(RequestError):
    http_status = 404


class UnauthorizedError(RequestError):
    http_status = 401


class ForeignOriginError(RequestError):
    """`origin`: of the page that asks."""

    http_status = 403

    def __init__(self, origin: str) -> None:
        super().__init__(
            f"pages of {origin!r} may not ask this server; whoever runs it can allow them (cors.origins)"
        )


class WrongMethodError(RequestError):
    http_status = 405


class BodyTooLargeError(RequestError):
    http_status = 413


class UnsupportedMediaError(RequestError):
    """`coding`: of a body that is compressed."""

    http_status = 415

    def __init__(self, coding: str) -> None:
        super().__init__(
            f"the body is compressed ({coding}), which this server does not undo: send it as it is"
        )


class RequestTimeoutError(RequestError):
    http_status = 408


class HeadersTooLargeError(RequestError):
    http_status = 431


class UnknownCodingError(RequestError):
    """Of a body in transfer (RFC 9112, 6.1)."""

    http_status = 501


class RateLimitError(OverloadedError):
    """A tenant asks for more than `allowed`: by its `limit`, an option of `auth.tenants`."""

    code = "rate_limit_exceeded"

    def __init__(self, limit: str, allowed: str, wait_s: float) -> None:
        retry_after_s = max(1, math.ceil(wait_s))
        super().__init__(
            f"this API key's tenant may have {allowed} ({limit}); try again in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )
        self.limit = limit


class Problem(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(msgspec.Struct, frozen=True):
    error: Problem


STOPPING = UnavailableError("the server is stopping; send the request again")
"""Ends the answers that are under way when the time for them is over."""
INTERNAL_MESSAGE = "internal error; the server's log says more"


def status_of(error: BaseException) -> int:
    """The HTTP status that answers `error`; 500 for a bug of ours."""
    return error.http_status if isinstance(error, IsthmusError) else 500


def problem_json(error: BaseException) -> bytes:
    """The error object for a body or an SSE event. A bug's own message stays in the log."""
    message = str(error) if isinstance(error, IsthmusError) else INTERNAL_MESSAGE
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError | RateLimitError) else _code(status_of(error))
    return msgspec.json.encode(ProblemBody(Problem(message, _type(status_of(error)), param, code)))


def problem_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers that belong to `error`, besides its body's."""
    if isinstance(error, OverloadedError | UnavailableError):
        return [(b"retry-after", str(error.retry_after_s).encode())]
    if isinstance(error, UnauthorizedError):
        return [(b"www-authenticate", b"Bearer")]
    if status_of(error) == UnsupportedMediaError.http_status:
        return [(b"accept-encoding", b"identity")]
    if isinstance(error, ForeignOriginError):
        return [(b"vary", b"Origin")]
    return []


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code(status: int) -> str | None:
    return {429: "overloaded", 503: "unavailable"}.get(status)
