"""Sinks as users name them: strings such as ``"jsonl:metrics.jsonl"``, or objects.

Errors are raised before the training starts. Packages are only looked up here; they are imported
when the sink is made, still in the caller's thread: a data loader must not fork its workers during
an import.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from rankscope.bus.finding import Severity
from rankscope.errors import MissingExtraError, UsageError
from rankscope.sinks.base import Sink
from rankscope.sinks.delivery import PASSWORD, USER

SinkOption = str | Sink | Iterable[str | Sink]


@dataclass(frozen=True, slots=True)
class PlannedSink:
    """A sink that can be made."""

    name: str  # in messages, without secrets
    make: Callable[[], Sink]
    # the string that another process can make it from; empty for one that has to live in the
    # training's process: objects, and trackers whose open run is the training's own
    spec: str = ""


_ALERTS = ("webhook", "slack", "mailto")

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")
_PORT = re.compile(r":[0-9]+$")

_ALERT = "alert:"  # begins the spec of an alert, where it stands among the specs of sinks


def plan_sinks(sinks: SinkOption) -> tuple[PlannedSink, ...]:
    """Return the plans of sinks, given as specs, sink objects, or one of either."""
    if isinstance(sinks, str | Sink):
        sinks = (sinks,)
    if not isinstance(sinks, Iterable):
        raise UsageError(f"sinks must be a list of strings or Sink objects, got {sinks!r}")
    return tuple(_plan(sink) for sink in sinks)


def plan_alerts(alerts: str | Iterable[str]) -> tuple[PlannedSink, ...]:
    """Return the plans of the sinks that send alerts, from one or several places to send them to.

    Error messages hold no part of a place but its kind.
    """
    given = (alerts,) if isinstance(alerts, str) else alerts
    if not isinstance(given, Iterable) or not all(isinstance(each, str) for each in given):
        raise UsageError(f"alerts must be {', '.join(ALERT_FORMS)}, or a list of these")
    return tuple(_plan_alert(each) for each in given)


def _plan_alert(place: str) -> PlannedSink:
    kind, _, rest = place.partition(":")
    if kind not in _ALERTS:
        known = ", ".join(ALERT_FORMS)
        raise UsageError(f"an alert must be one of {known}, got one that begins with another word")
    return replace(_KINDS[kind](rest, alerts=True), spec=f"{_ALERT}{place}")


def _plan(sink: Any) -> PlannedSink:
    if isinstance(sink, str):
        if sink.startswith(_ALERT):
            return _plan_alert(sink.removeprefix(_ALERT))
        kind, _, rest = sink.partition(":")
        if kind not in _KINDS:
            # The rest after the kind may be a secret.
            near = get_close_matches(kind, _KINDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"a sink must be one of {', '.join(FORMS)}, got {kind!r}{hint}")
        planned = _KINDS[kind](rest)
        if kind in _PACKAGES and find_spec(_PACKAGES[kind]) is None:
            raise MissingExtraError(f"the sink {kind!r}", kind)
        return planned if kind in _IN_TRAINING else replace(planned, spec=sink)
    if isinstance(sink, Sink) and not isinstance(sink, type):
        name = getattr(sink, "name", type(sink).__name__)
        return PlannedSink(str(name), lambda: sink)
    if isinstance(sink, type):
        raise UsageError(f"a sink must be an object, got the class: {sink.__name__}()")
    raise UsageError(
        "a sink must be a string, or an object with open, step, finding and close, got "
        f"{sink!r}; the strings are {', '.join(FORMS)}"
    )


def _made_by(module: str, name: str, *given: Any, **options: Any) -> Callable[[], Sink]:
    """Return a function that imports a module and makes a sink of its class."""

    def make() -> Sink:
        sink: Sink = getattr(import_module(f"rankscope.sinks.{module}"), name)(*given, **options)
        return sink

    return make


def _plan_optional(kind: str, name: str) -> Callable[[str], PlannedSink]:
    """Return a function that plans a sink with one optional argument."""
    return lambda rest: PlannedSink(kind, _made_by(kind, name, rest or None))


def _plan_prometheus(rest: str) -> PlannedSink:
    host, _, port = rest.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(
            "the sink prometheus expected prometheus:PORT or prometheus:HOST:PORT with a port "
            f"from 0 to 65535, got 'prometheus:{rest}'"
        )
    address = host.strip("[]") or "127.0.0.1"
    return PlannedSink("prometheus", _made_by("prometheus", "PrometheusSink", int(port), address))


def _plan_webhook(rest: str, *, slack: bool = False, alerts: bool = False) -> PlannedSink:
    """Plan a webhook; ``severity`` comes from the URL's query, and the URL is never logged."""
    kind = "slack" if slack else "webhook"
    parts = _split_url(kind, rest)
    query = parse_qsl(parts.query, keep_blank_values=True)
    given = [value for key, value in query if key == "severity"]
    severity = _severity(kind, given, alerts=alerts)
    url = rest
    if given:
        others = urlencode([pair for pair in query if pair[0] != "severity"])
        url = parts._replace(query=others).geturl()
    options = {"severity": severity, "slack": slack, "alerts": alerts}
    make = _made_by("webhook", "WebhookSink", url, **options)
    return PlannedSink(f"{kind} to {parts.hostname}", make)


def _plan_mail(rest: str, *, alerts: bool = False) -> PlannedSink:
    """Plan e-mail; ``smtp``, ``from`` and ``severity`` come from the query."""
    expected = "the sink mailto expected mailto:ADDRESS or mailto:ADDRESS?smtp=HOST:PORT"
    places, _, more = rest.partition("?")
    recipients = [unquote(each) for each in places.split(",")]
    query = dict(parse_qsl(more, keep_blank_values=True))
    if others := sorted(query.keys() - {"smtp", "from", "severity"}):
        raise UsageError(f"{expected}, with from=ADDRESS and severity=…, got {', '.join(others)}")
    senders = [query["from"]] if "from" in query else []
    if not all(_ADDRESS.fullmatch(each) for each in [*recipients, *senders]):
        raise UsageError(f"{expected}, and addresses such as ops@example.org, commas between them")
    server = query.get("smtp", "localhost")
    if "@" in server:
        raise UsageError(f"{expected}; a login belongs into the environment ({USER}, {PASSWORD})")
    host, _, port = server.rpartition(":") if _PORT.search(server) else (server, "", "25")
    if not re.fullmatch(r"[A-Za-z0-9.:_-]+", host.strip("[]")) or int(port) > 65535:
        raise UsageError(f"{expected} with a host, and a port up to 65535")
    given = [query["severity"]] if "severity" in query else []
    options = {
        "host": host.strip("[]"),
        "port": int(port),
        "sender": query.get("from"),
        "severity": _severity("mailto", given, alerts=alerts),
        "alerts": alerts,
    }
    return PlannedSink("mailto", _made_by("mail", "MailSink", recipients, **options))


def _split_url(kind: str, url: str) -> SplitResult:
    """Split a URL; error messages have no part of it, as it may be a secret."""
    if re.fullmatch(r"[!-~]*", url) is None:
        raise UsageError(
            f"the sink {kind} expected {kind}:URL in printable ASCII, got a blank or another "
            "character that no URL may hold; write it in percent-encoding, a blank as %20"
        )
    expected = f"the sink {kind} expected {kind}:URL with http:// or https:// and a host"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port  # raises if it is impossible
        host.encode("idna")
    except ValueError:  # its message may hold a password
        raise UsageError(f"{expected}, and a port up to 65535 if any") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(expected)
    if "@" in parts.netloc:
        raise UsageError(f"{expected}; a user's name and password before the host cannot be sent")
    return parts


def _severity(kind: str, given: Sequence[str], *, alerts: bool) -> Severity:
    """Return the severity of the last of the given names that has one, else that of the kind."""
    if not given:
        return Severity.WARNING if alerts else Severity.NOTE
    try:
        return Severity[given[-1].upper()]
    except KeyError:
        known = ", ".join(map(str, Severity))
        raise UsageError(f"the sink {kind} expected severity={known}, got {given[-1]!r}") from None


def _plan_command(rest: str) -> PlannedSink:
    if not rest.strip():
        raise UsageError("the sink command expected command:COMMAND, got no command")
    return PlannedSink("command", _made_by("command", "CommandSink", rest))


_IN_TRAINING = frozenset({"wandb", "mlflow"})
_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "prometheus": "prometheus_client",
}
"""The package that a sink needs."""
_PLANS: dict[str, Callable[..., PlannedSink]] = {
    "tensorboard[:LOGDIR]": _plan_optional("tensorboard", "TensorBoardSink"),
    "wandb[:PROJECT]": _plan_optional("wandb", "WandbSink"),
    "mlflow[:EXPERIMENT]": _plan_optional("mlflow", "MlflowSink"),
    "trackio[:PROJECT]": _plan_optional("trackio", "TrackioSink"),
    "prometheus:[HOST:]PORT": _plan_prometheus,
    "jsonl[:PATH]": _plan_optional("jsonl", "JsonLinesSink"),
    "webhook:URL": _plan_webhook,
    "slack:URL": partial(_plan_webhook, slack=True),
    "mailto:ADDRESS[?smtp=HOST:PORT]": _plan_mail,
    "command:COMMAND": _plan_command,
}
"""What plans a sink, by its form."""
_KINDS = {re.split(r"[\[:]", form)[0]: plan for form, plan in _PLANS.items()}
FORMS = tuple(_PLANS)
ALERT_FORMS = tuple(form for form in FORMS if form.partition(":")[0] in _ALERTS)
