"""A webhook: one JSON request for each finding that opens, gets worse or closes."""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import IO
from urllib.parse import urlsplit

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.sinks.base import NewsSink, SinkError, plain_finding, sentence

_log = logging.getLogger("rankscope")

REQUEST_SECONDS = 10.0
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each further try."""

_LATER = (408, 425, 429)
"""Answers below 500 that ask to try again."""

_REDIRECTS = (301, 302, 303, 307, 308)
_WITH_BODY = (307, 308)
"""Redirects that keep the request; others would send an empty one."""


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
        """Return the request to send instead.

        Raises:
            HTTPError: There is none.
        """
        here = urlsplit(req.full_url)
        there = urlsplit(newurl)
        alike = here.hostname == there.hostname and there.scheme in (here.scheme, "https")
        if code not in _WITH_BODY or not alike:
            raise urllib.error.HTTPError(newurl, code, msg, headers, fp)
        return urllib.request.Request(newurl, req.data, req.headers, method=req.get_method())


_OPENER = urllib.request.build_opener(_SameHostRedirects)


class WebhookSink(NewsSink):
    """Posts JSON with ``text`` (one paragraph), ``event``, ``run`` and ``finding``.

    A request that fails for now is tried again, after longer and longer pauses; the next finding
    starts anew. A request that is refused for good ends the sink.

    Args:
        url: The URL; never shown, as it may hold a secret.
        severity: Findings that were never this severe are left out.
        sleep: Waits some seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        severity: Severity = Severity.NOTE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(severity)
        self._url = url
        self._sleep = sleep
        self._warned = False

    def notify(self, finding: Finding, event: FindingEvent) -> None:
        """Post a finding that opened, got worse or closed.

        Raises:
            SinkError: The server refuses it for good, or the URL is none.
        """
        body = {
            "text": f"{self.run.run_dir.name}: {sentence(finding, event)}",
            "event": str(event),
            "run": str(self.run.run_dir),
            "finding": plain_finding(finding),
        }
        problem = self._post(json.dumps(body).encode())
        if problem and not self._warned:
            self._warned = True
            _log.warning(
                "sink webhook could not tell of %s after %d tries (%s); it goes on with the next "
                "finding, and this warning is not repeated",
                finding.id,
                1 + len(PAUSES),
                problem,
            )

    def _post(self, body: bytes) -> str:
        """Post with retries; return the last problem, empty after success."""
        problem = self._try(body)
        for pause in PAUSES:
            if not problem:
                break
            self._sleep(pause)
            problem = self._try(body)
        return problem

    def _try(self, body: bytes) -> str:
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
