"""Errors as OpenAI writes them, `{"error": {"message", "type", "param", "code"}}`, and their HTTP status."""

from __future__ import annotations

import math

import msgspec

from isthmus.core.errors import IsthmusError, OverloadedError, RequestError, UnavailableError


class HttpError(RequestError):
    """A request that is answered with `status`."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.http_status = status


def unknown_model(name: str, served: str) -> HttpError:
    message = f"The model {name!r} does not exist; this server serves {served!r}"
    return HttpError(404, message, param="model", code="model_not_found")


def compressed(coding: str) -> HttpError:
    """The refusal of a body that is compressed."""
    return HttpError(
        415, f"the body is compressed ({coding}), which this server does not undo: send it as it is"
    )


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


def status_of(error: BaseException) -> int:
    """The HTTP status that answers `error`; 500 for a bug of ours."""
    return error.http_status if isinstance(error, IsthmusError) else 500


def message_of(error: BaseException) -> str:
    """What a client is told. A bug's own message stays in the log."""
    return str(error) if isinstance(error, IsthmusError) else "internal error; the server's log says more"


def problem_json(error: BaseException) -> bytes:
    """The error object for a body or an SSE event."""
    param = error.param if isinstance(error, RequestError) else None
    code = error.code if isinstance(error, RequestError | RateLimitError) else _code(status_of(error))
    return msgspec.json.encode(ProblemBody(Problem(message_of(error), _type(status_of(error)), param, code)))


def problem_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers that belong to `error`, besides its body's."""
    if isinstance(error, OverloadedError | UnavailableError):
        return [(b"retry-after", str(error.retry_after_s).encode())]
    return _HEADERS.get(status_of(error), [])


_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    403: [(b"vary", b"Origin")],
    415: [(b"accept-encoding", b"identity")],
}


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _code(status: int) -> str | None:
    return {429: "overloaded", 503: "unavailable"}.get(status)
