"""Who may see the page, and what a browser may do with it.

On the loopback address the name in the ``Host`` header must be one of this machine's own: a page
of another site that lets its name point to 127.0.0.1 gets nothing. Elsewhere a token is needed;
it comes once in the address and then in a cookie that scripts cannot read, and that a browser
sends only when a page of this server asks. Of a link on another site, a redirect would still be
that site's question; so the token is answered by a small page that goes on by itself.
"""

import hashlib
import hmac
import ipaddress
from html import escape
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""As strict as the report's: figures compile their expressions and set styles of their own."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

_NO_TOKEN = (
    "<!doctype html><html lang=en><title>rankscope</title>"
    "<p>This page needs the token that <code>rankscope serve</code> printed when it was started. "
    "Open the address that it printed, which ends in <code>?token=…</code>."
)

_GO_ON = (
    "<!doctype html><html lang=en><title>rankscope</title>"
    '<meta http-equiv=refresh content="0;url={address}">'
    '<p><a href="{address}">Go on to the page.</a>'
)


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on, or the name in a ``Host`` header, is this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Guard:
    """Answers what must not reach the pages, and adds the headers that bind a browser.

    Args:
        app: The pages.
        token: What a viewer must know; None when it is not needed.
        own_names_only: Whether the ``Host`` header must name the loopback address.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, own_names_only: bool) -> None:
        self._app = app
        self._token = token
        self._own_names_only = own_names_only
        digest = hashlib.sha256(b"rankscope live page " + (token or "").encode()).hexdigest()
        self._cookie = f"rankscope_{digest[:8]}"
        self._cookie_value = digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or self._entry(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is only to be read.", 405, {"allow": "GET, HEAD"})
        if self._own_names_only and not is_loopback(_name_of(headers.get("host", ""))):
            return PlainTextResponse(
                "This page answers to localhost only: open it as http://localhost and its port, "
                "also through a forwarded port.",
                421,
            )
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """Return the answer to a viewer who lacks the token, or just brought it; None to go on."""
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        brought = [value for name, value in query if name == "token"]
        if brought:
            if not _equal(brought[-1], self._token):
                return HTMLResponse(_NO_TOKEN, 401)
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            address = quote("/" + scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            answer = HTMLResponse(_GO_ON.format(address=escape(address)))
            answer.set_cookie(
                self._cookie, self._cookie_value, httponly=True, samesite="strict", path="/"
            )
            return answer
        return None if self._has_cookie(scope) else HTMLResponse(_NO_TOKEN, 401)

    def _has_cookie(self, scope: Scope) -> bool:
        """Return whether the cookie is among those sent, whatever other programs have set there."""
        sent = ";".join(Headers(scope=scope).getlist("cookie")).split(";")
        pairs = (pair.strip().partition("=")[::2] for pair in sent)
        return any(n == self._cookie and _equal(v, self._cookie_value) for n, v in pairs)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _name_of(host: str) -> str:
    """Return the name in a ``Host`` header without its port.

    >>> _name_of("localhost:8321"), _name_of("[::1]:80")
    ('localhost', '[::1]')
    """
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return sending
