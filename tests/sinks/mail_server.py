"""A mail server on the loopback that keeps what it is sent."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from typing import Any


class MailServer(socketserver.ThreadingTCPServer):
    """Takes messages; ``answers`` are its next answers to a recipient, then it takes all."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.answers: list[str] = []
        self.recipients: list[str] = []
        self.messages: list[Any] = []

    @property
    def place(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.server_address[1]}"


class _Conversation(socketserver.StreamRequestHandler):
    server: MailServer

    def handle(self) -> None:
        self._answer("220 here")
        for line in self.rfile:
            match line[:4].upper():
                case b"RCPT":
                    answer = self.server.answers.pop(0) if self.server.answers else "250 ok"
                    if answer.startswith("250"):
                        self.server.recipients.append(line.decode().strip().partition(":")[2])
                    self._answer(answer)
                case b"DATA":
                    self._answer("354 go on")
                    content = b"".join(iter(self.rfile.readline, b".\r\n"))
                    self.server.messages.append(message_from_bytes(content, policy=policy.default))
                    self._answer("250 ok")
                case b"QUIT":
                    self._answer("221 bye")
                    return
                case _:
                    self._answer("250 ok")

    def _answer(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def mail_server() -> Iterator[MailServer]:
    """Run a mail server in a thread."""
    with MailServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
