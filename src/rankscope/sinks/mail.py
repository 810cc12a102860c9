"""E-mail: one message for each finding that opens, gets worse or closes."""

import os
import smtplib
import socket
import ssl
from collections.abc import Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.sinks.base import SinkError
from rankscope.sinks.delivery import PASSWORD, USER, DeliverySink

SECONDS = 10.0  # seconds that each answer of the server may take
TLS_PORT = 465  # the port on which a connection begins with TLS


class MailSink(DeliverySink):
    """Sends plain text over SMTP.

    The connection is encrypted where the server offers it (STARTTLS), and on port 465. With a login
    in the environment, it must be, by a certificate that is valid. The sender is by default
    ``rankscope`` at this host.
    """

    def __init__(
        self,
        recipients: Sequence[str],
        *,
        host: str,
        port: int,
        sender: str | None = None,
        severity: Severity = Severity.NOTE,
        alerts: bool = False,
    ) -> None:
        super().__init__("mailto", severity, alerts=alerts)
        self._recipients = tuple(recipients)
        self._host = host
        self._port = port
        self._sender = sender or f"rankscope@{socket.gethostname()}"

    def attempt(self, finding: Finding, event: FindingEvent, text: str) -> str:
        """Send once; return what went wrong for now, or nothing; SinkError if it is for good."""
        message = EmailMessage()
        message["From"] = self._sender
        message["To"] = ", ".join(self._recipients)
        message["Date"] = formatdate()
        message["Message-ID"] = make_msgid(domain=self._sender.rpartition("@")[2])
        run = "".join(letter if letter.isprintable() else "?" for letter in self.run.run_dir.name)
        message["Subject"] = f"rankscope: {run}: {finding.severity} {finding.cause} {event}"
        message.set_content(text.encode(errors="replace").decode())  # names of any bytes
        try:
            self._deliver(message)
        except smtplib.SMTPResponseException as error:
            return _unless_for_good(error.smtp_code)
        except smtplib.SMTPRecipientsRefused as error:
            return _unless_for_good(max(code for code, _ in error.recipients.values()))
        except (smtplib.SMTPNotSupportedError, ssl.SSLCertVerificationError) as error:
            raise SinkError(f"no message can be sent to the mail server: {error}") from None
        except (smtplib.SMTPException, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _deliver(self, message: EmailMessage) -> None:
        user = os.environ.get(USER)
        password = os.environ.get(PASSWORD, "")
        context = ssl.create_default_context()
        if user is None:  # as mail servers do among themselves: better than no encryption
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        name = socket.gethostname()
        with (
            smtplib.SMTP_SSL(self._host, self._port, name, timeout=SECONDS, context=context)
            if self._port == TLS_PORT
            else smtplib.SMTP(self._host, self._port, name, timeout=SECONDS)
        ) as server:
            server.ehlo()
            if self._port != TLS_PORT and (user is not None or server.has_extn("starttls")):
                server.starttls(context=context)
            if user is not None:
                server.login(user, password)
            server.send_message(message)


def _unless_for_good(code: int) -> str:
    """Return a problem that may pass; SinkError if it does not."""
    if code >= 500:
        raise SinkError(
            f"the mail server answered {code}: check the addresses, and the login in {USER} and "
            f"{PASSWORD}"
        )
    return f"the server answered {code}"
