"""Access control of the dashboard: a token, a check of the Host header, and headers that restrict the browser.

The token is needed on the loopback address, too, because every user of a login node reaches it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Name of the query parameter.
TOKEN = "token"
COOKIE_AGE_S = 30 * 24 * 3600
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSED = "The dashboard needs its token. Open the address that `primeslurm dashboard` printed.\n"


def host_of(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class AccessControl:
    """ASGI middleware that refuses requests without the token or for an unknown host name.

    Args:
        hosts: names of this host that requests may use. IP addresses are always accepted.
        cookie: name of the cookie. Browsers share cookies between ports, so each dashboard needs its own name.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str], cookie: str) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # no web sockets
        answer = self._answer(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _answer(self, scope: Scope) -> Response | None:
        """Return a refusal, or a redirect that sets the cookie; None if it may pass."""
        headers = Headers(scope=scope)
        # A foreign web page can make its own name resolve to this host (DNS rebinding), and its scripts could then read
        # the dashboard. The browser still sends that foreign name as the host.
        host = host_of(headers.get("host", "")).lower()
        if not is_address(host) and host not in self._hosts:
            return PlainTextResponse("unknown host name\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads\n", 405)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == TOKEN]
        if given and self._is_token(given[-1]):
            rest = urlencode([(name, value) for name, value in query if name != TOKEN])
            # A location that starts with "//" would lead to another host.
            path = "/" + scope["path"].lstrip("/")
            redirect = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            redirect.set_cookie(self._cookie, self._token, COOKIE_AGE_S, httponly=True, samesite="strict")
            return redirect
        # Other programs on this host share their cookies with the dashboard, valid or not.
        if not self._is_token(HTTPConnection(scope).cookies.get(self._cookie, "")):
            return PlainTextResponse(REFUSED, 401)
        return None

    def _is_token(self, word: str) -> bool:
        return hmac.compare_digest(word.encode(errors="replace"), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return sending
