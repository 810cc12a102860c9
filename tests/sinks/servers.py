"""A web server and a mail server on the loopback, which keep what they are sent."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeVar


class WebServer(HTTPServer):
    """``answers`` are its next status codes, some with a place to go on to; then it takes all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Web)
        self.answers: list[Any] = []
        self.got: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class _Web(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        code, place = answer if isinstance(answer, tuple) else (answer, None)
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body), code))
        self.send_response(code)
        if place is not None:
            self.send_header("Location", place)
        self.end_headers()

    def do_GET(self) -> None:
        self.server.got.append((self.path, None, None, "GET"))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class MailServer(socketserver.ThreadingTCPServer):
    """Takes messages; ``answers`` are its next answers to a recipient, then it takes all."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Mail)
        self.answers: list[str] = []
        self.recipients: list[str] = []
        self.messages: list[Any] = []

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Mail(socketserver.StreamRequestHandler):
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


Server = TypeVar("Server", WebServer, MailServer)


@contextmanager
def running(made: type[Server]) -> Iterator[Server]:
    with made() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
