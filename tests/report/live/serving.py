"""A live server in a thread, what it answers, and trainings that write while it serves."""

import contextlib
import gzip
import http.client
import json
import threading
import time
from dataclasses import dataclass, replace

from rankscope.agent.assembly import summarize
from rankscope.bus.detector import RunFacts
from rankscope.record import RunWriter
from rankscope.report.live import live_server
from rankscope.verdict.diagnosis import Diagnosis
from report.recorded_runs import gathered, sampler

SECONDS_PER_STEP = 0.4
PATIENCE = 60_000  # of browsers, in milliseconds


@contextlib.contextmanager
def serving(directory, **options):
    options = {"port": 0, "poll_seconds": 0.05, "refresh_seconds": 0.0, **options}
    server = live_server(directory, **options)
    thread = threading.Thread(target=server.serve_until_stopped, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self):
        return json.loads(self.text)


def get(server, path, *, method="GET", **headers):
    """Ask a server, with these headers; it takes compressed answers unless the headers do not."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"accept_encoding": "gzip", **headers}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        response = connection.getresponse()
        content = response.read()
        known = {name.lower(): value for name, value in response.getheaders()}
        if known.get("content-encoding") == "gzip" and content:
            content = gzip.decompress(content)
        return Answer(response.status, known, content.decode())
    finally:
        connection.close()


@contextlib.contextmanager
def events(server, topic, have=""):
    """Listen to a page's events: pairs of name and data, without those that say it is alive."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/events?topic={topic}&have={have}")
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")

    def read():
        name = ""
        while line := response.readline().decode().rstrip("\r\n") or "-":
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data" and name != "ping":
                yield name, value

    try:
        yield read()
    finally:
        connection.close()


class Training:
    def __init__(self, path, *, num_workers=4, reading="sharded", **info):
        facts = {"num_workers": num_workers, "model": "tiny (built-in base)", "data": "simulated"}
        self.writer = RunWriter(path, {**facts, **info})
        self.num_workers = num_workers
        settings = {"sharded": "s1-1", "replicated": "s1-2"}
        self._draws = {name: sampler(name, own, num_workers) for name, own in settings.items()}
        self._reading = reading
        self._diagnosis = Diagnosis(RunFacts(num_workers))
        self._began = time.time() - 60
        self.step = 0

    def steps(self, number, *, reading=""):
        """Take steps and flush, as if the last one was taken just now."""
        draw = self._draws[reading or self._reading]
        for _ in range(number):
            batches = [draw(self.step, rank) for rank in range(self.num_workers)]
            step = gathered(self.step, batches, 60)
            report = summarize(replace(step, time=self._began + SECONDS_PER_STEP * self.step))
            self.writer.add(report)
            self.writer.add_findings(self._diagnosis.observe(report))
            self.step += 1
        self.writer.flush()

    def close(self):
        self.writer.add_findings(self._diagnosis.close())
        self.writer.close()
