"""Which web pages may ask the server: CORS, and a refusal of all other pages.

A page can send most requests without asking first, and only its reading of the answer is then prevented, so that any
page that a user visits could make a server on the user's own machine compute. Programs that are no browsers send no
`Origin`, and nothing here concerns them.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from isthmus.live.gateway.http import NOTE
from isthmus.live.gateway.problems import ForeignOriginError

ANY = "*"
OF_THIS_MACHINE = (
    r"https?://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(?!https?:)[a-z][a-z0-9+.-]*://.*"
)
"""Pages that a server or a program here has (`app://…`, `vscode-webview://…`): no site can have such an origin."""
READABLE = ("Retry-After", "X-Request-Id", NOTE.decode())
"""Headers of answers that scripts may read, beside the usual ones."""
MAX_SHOWN_CHARS = 200


class Origins:
    """ASGI middleware: answers preflights, tells browsers that they may show answers to pages of the origins `allowed`
    (None: those of this machine), and has `refuse` answer other pages, their bodies unread."""

    def __init__(
        self, app: ASGIApp, *, allowed: tuple[str, ...] | None, refuse: Callable[[Exception], ASGIApp]
    ) -> None:
        self._refuse = refuse
        self._cors = CORSMiddleware(
            app,
            allow_origins=allowed or (),
            allow_origin_regex=OF_THIS_MACHINE if allowed is None else None,
            allow_methods=["*"],  # a wrong one is refused where its answer can be read
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=READABLE,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or self._cors.is_allowed_origin(origin):
            await self._cors(scope, receive, send)
        else:
            await self._refuse(ForeignOriginError(origin[:MAX_SHOWN_CHARS]))(scope, receive, send)
