"""Every exception Isthmus raises on purpose.

    IsthmusError
    ├── ConfigError          the user's file or flags are wrong           exit 2
    ├── ModelError           a model folder cannot be loaded              exit 3
    ├── StartError           a process cannot start (port, memory, child) exit 4
    ├── RequestError         one request is wrong                         HTTP 400
    │   └── UnknownModelError  it asks for a model that is not there      HTTP 404
    ├── OverloadedError      refused for now; says when to try again      HTTP 429
    ├── UnavailableError     no node can serve this now                   HTTP 503
    ├── TimedOutError        no server answered in the time allowed       HTTP 504
    └── ProtocolError        a peer sent something it must not send

Bugs of ours are assertions, not members of this tree.
"""

from __future__ import annotations


class IsthmusError(Exception):
    """Base of the tree. `str(error)` is one line for each thing wrong: what, where, what to do."""

    exit_code = 1
    http_status = 500


class ConfigError(IsthmusError):
    exit_code = 2


class ModelError(IsthmusError):
    exit_code = 3


class StartError(IsthmusError):
    exit_code = 4


class RequestError(IsthmusError):
    """A request that cannot be served as written; `param` names the field at fault."""

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModelError(RequestError):
    """No model of that name; `known`: names that there are, in words."""

    http_status = 404

    def __init__(self, name: str, known: str) -> None:
        message = f"the model {name!r} does not exist; there are {known}"
        super().__init__(message, param="model", code="model_not_found")


class OverloadedError(IsthmusError):
    """Refused at arrival, or later, before its first token; `retry_after_s` is whole seconds."""

    http_status = 429

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(IsthmusError):
    """Nothing can serve it now; `retry_after_s` is whole seconds."""

    http_status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TimedOutError(IsthmusError):
    http_status = 504


class ProtocolError(IsthmusError):
    http_status = 502
