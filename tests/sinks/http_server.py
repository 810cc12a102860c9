"""A web server on the loopback that keeps what it is sent."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class WebServer(HTTPServer):
    """``answers`` are its next status codes, some with a place to go on to; then it takes all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[Any] = []
        self.got: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        code, place = answer if isinstance(answer, tuple) else (answer, None)
        kind = self.headers["Content-Type"]
        self.server.got.append((self.path, kind, json.loads(body), code))
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


@contextmanager
def http_server() -> Iterator[WebServer]:
    """Run a web server in a thread."""
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
