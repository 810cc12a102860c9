"""A webhook: one JSON request for each finding that opens, gets worse or closes."""

import http.client
import json
import urllib.error
import urllib.request
from html import escape
from typing import IO, Any
from urllib.parse import urlsplit

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.sinks.base import SinkError, plain_finding
from rankscope.sinks.delivery import DeliverySink

REQUEST_SECONDS = 10.0

_LATER = (408, 425, 429)  # answers below 500 that ask to try again

_REDIRECTS = (301, 302, 303, 307, 308)
_WITH_BODY = (307, 308)  # redirects that keep the request; others would send an empty one


class _SameHostRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects that keep the request, on the same host; others are errors."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request:
        """Return the request to send instead; HTTPError if there is none."""
        here = urlsplit(req.full_url)
        there = urlsplit(newurl)
        alike = here.hostname == there.hostname and there.scheme in (here.scheme, "https")
        if code not in _WITH_BODY or not alike:
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        return urllib.request.Request(newurl, req.data, req.headers, method=req.get_method())


_OPENER = urllib.request.build_opener(_SameHostRedirects)


class WebhookSink(DeliverySink):
    """Posts JSON with ``text`` (one paragraph), ``event``, ``run`` and ``finding``.

    To ``slack`` and servers like it, ``text`` alone. The URL is never shown: it may hold a secret.
    """

    def __init__(
        self,
        url: str,
        *,
        slack: bool = False,
        severity: Severity = Severity.NOTE,
        alerts: bool = False,
    ) -> None:
        super().__init__("slack" if slack else "webhook", severity, alerts=alerts)
        self._url = url
        self._slack = slack

    def attempt(self, finding: Finding, event: FindingEvent, text: str) -> str:
        """Post once; return what went wrong for now, or nothing; SinkError if it is for good."""
        body: dict[str, Any] = {"text": escape(text, quote=False)}  # Slack's own rule
        if not self._slack:
            body = {
                "text": text,
                "event": str(event),
                "run": str(self.run.run_dir),
                "finding": plain_finding(finding),
            }
        return self._post(json.dumps(body).encode())

    def _post(self, body: bytes) -> str:
        headers = {"Content-Type": "application/json", "User-Agent": "rankscope"}
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with _OPENER.open(request, timeout=REQUEST_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            code = error.code
            error.close()
            if code in _REDIRECTS:
                raise SinkError(
                    f"the server answered {code}, which sends on elsewhere or would lose what is "
                    "posted: give the URL that takes it"
                ) from None
            if code < 500 and code not in _LATER:
                raise SinkError(
                    f"the server answered {code}: check the URL and that it takes JSON"
                ) from None
            return f"the server answered {code}"
        except (ValueError, http.client.InvalidURL):  # their messages hold a part of the URL
            raise SinkError(
                "the URL, or one that the server sends on to, is none: check it for blanks, its "
                "host and its port"
            ) from None
        except http.client.HTTPException as error:
            return type(error).__name__
        except OSError as error:
            return f"{type(error).__name__}: {getattr(error, 'reason', error)}"
