"""The server as a viewer meets it: addresses, who may see them, and what is pushed."""

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import rankscope.report.live.server as server_module
from rankscope import Run
from rankscope.errors import UsageError
from rankscope.report.live import board, live_server
from rankscope.report.live.catalog import id_of
from rankscope.report.live.sheets import addresses
from report.html_reader import Page, data_names
from report.live.serving import Training, events, get, serving

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("served") / "runs"
    for name, reading in (("good", "sharded"), (HOSTILE.replace("/", ""), "replicated")):
        training = Training(root / name, reading=reading, name=HOSTILE)
        training.steps(12)
        training.close()
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    shutil.copytree(root / "good", root / "half")
    part = next((root / "half" / "workers").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:50])
    with serving(root) as server:
        server.root = root
        yield server


def test_all_runs_are_listed_with_the_worst_first(served: Any):
    page = Page(get(served, "/").text)
    order = [page.words.index(word) for word in ("Error", "Unreadable", "Too early")]

    assert order == sorted(order)
    assert "4 runs, 2 to look at" in page.words
    assert "Workers train on the same batches" in page.words
    assert page.tags["script"] == 3


def test_a_page_of_a_run_holds_what_the_report_holds(served: Any):
    answer = get(served, "/run/good")
    page = Page(answer.text)

    assert answer.status == 200
    assert answer.headers["content-encoding"] == "gzip"
    assert {"loss", "loss_std", "heatmap", "workers-loss"} <= set(page.figures)
    assert set(page.figures) == set(page.specs)
    assert "Too early Too short to judge" in page.words
    assert "Complete" in page.words


def test_everything_that_a_page_loads_comes_from_this_server(served: Any):
    page = Page(get(served, "/run/good").text)
    assets = [address for address in page.loads if address.startswith("/assets/")]

    assert len(assets) == 5
    for address in page.loads:
        assert re.match(r"(#[\w-]+$|/)", address), address
    for address in assets:
        answer = get(served, address)
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]
    assert get(served, assets[0].replace("/assets/", "/assets/x")).status == 404


def test_names_are_inert(served: Any):
    listed = get(served, "/").text
    ids = re.findall(r'href="/run/([^"]+)"', listed)
    hostile = next(found for found in ids if "~" in found)
    for path in ("/", f"/run/{hostile}", f"/compare?a={hostile}&b=good", f"/run/{HOSTILE}"):
        text = get(served, path.replace("<", "%3C").replace(">", "%3E")).text
        assert "<script>alert" not in text
        assert HOSTILE in Page(text).text or path.endswith(HOSTILE)


@pytest.mark.parametrize(
    "path",
    [
        "/run/..", "/run/../..", "/run/%2e%2e/%2e%2e/etc", "/run//etc", "/run/good/..",
        "/run/nothing", "/run/", "/run/good%00", "/assets/..%2f..%2fetc/passwd", "/nothing",
        "/api/run/..", "/events?topic=run:..", "/events", "/events?topic=x",
    ],
)  # fmt: skip
def test_nothing_else_is_reachable(served: Any, path: str):
    answer = get(served, path)
    assert answer.status == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize(("name", "words"), [("broken", "damaged"), ("half", "damaged")])
def test_a_damaged_run_says_so_calmly(served: Any, name: str, words: str):
    answer = get(served, f"/run/{name}")
    page = Page(answer.text)

    assert answer.status == 200
    assert f"{name} cannot be read" in page.words
    assert words in page.words
    assert str(served.root) not in page.words
    assert "Traceback" not in answer.text


def test_an_error_that_nobody_foresaw_becomes_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    training = Training(tmp_path / "run")
    training.steps(1)

    def fail(run: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(board, "run_content", fail)
    words = board.Board(tmp_path).sheet("run:run")
    training.close()

    assert words is not None
    assert "cannot be shown at the moment (KeyError)" in words.main
    assert "secret" not in words.main
    assert "KeyError: 'secret'" in capfd.readouterr().err


def test_two_runs_are_compared(served: Any):
    other = re.findall(r'href="/run/([^"]+)"', get(served, "/").text)[0]
    page = Page(get(served, f"/compare?a=good&b={other}").text)

    assert "compare-loss" in page.figures
    assert set(page.figures) == set(page.specs)
    assert "Choose two runs" in Page(get(served, "/compare").text).words
    assert "is not here" in Page(get(served, "/compare?a=good&b=..").text).words
    assert "damaged" in Page(get(served, "/compare?a=good&b=broken").text).words


def test_runs_that_cannot_be_read_are_left_out_of_an_overlay(served: Any):
    page = Page(get(served, "/overlay?run=good&run=broken&run=..&run=good").text)
    assert "1 run " in page.words
    assert "compare-loss" in page.figures
    assert "None of these runs is here" in Page(get(served, "/overlay?run=nothing").text).words


def test_news_hold_only_what_is_new(tmp_path: Path):
    training = Training(tmp_path / "run")
    training.steps(3)
    with serving(tmp_path) as server:
        whole = get(server, "/api/run/run").json
        same = get(server, f"/api/run/run?since={whole['version']}").json
        training.steps(3)
        newer = get(server, f"/api/run/run?since={whole['version']}").json
        training.close()

    assert set(whole["specs"]) == set(whole["names"]) != set()
    assert same["specs"] == same["datasets"] == {}
    assert same["version"] == whole["version"] != newer["version"]
    assert "loss" in newer["specs"]
    assert set(newer["datasets"]) == data_names(list(newer["specs"].values()))
    assert not set(newer["datasets"]) <= set(whole["datasets"])
    assert "step <b>5</b>" in newer["main"]


def test_a_flush_is_pushed_to_those_who_listen(tmp_path: Path):
    training = Training(tmp_path / "run")
    training.steps(2)
    with (
        serving(tmp_path) as server,
        events(server, "run:run") as told,
        events(server, "runs") as all_runs,
    ):
        assert next(told) == ("hello", "run:run")
        assert next(all_runs) == ("hello", "runs")
        name, version = next(told)
        next(all_runs)
        assert name == "news"
        assert version == get(server, "/api/run/run").json["version"]
        training.steps(2)
        name, newer = next(told)
        assert (name, newer != version) == ("news", True)
        while newer != get(server, "/api/run/run").json["version"]:
            name, newer = next(told)  # the first look came in the middle of the flush
            assert name == "news"
        assert next(all_runs)[0] == "news"
        training.close()
        assert next(told)[0] == "news"
        assert "Complete" in get(server, "/api/run/run").json["main"]


def test_a_page_is_told_whether_it_is_up_to_date(tmp_path: Path):
    training = Training(tmp_path / "run")
    training.steps(2)
    training.close()
    with serving(tmp_path) as server:
        version = get(server, "/api/runs").json["version"]
        with events(server, "runs", version) as told:
            assert [next(told), next(told)] == [("hello", "runs"), ("current", version)]
        with events(server, "runs", "another") as told:
            assert [next(told), next(told)] == [("hello", "runs"), ("news", version)]


def test_a_server_that_ends_ends_its_streams(tmp_path: Path):
    with serving(tmp_path) as server, events(server, "runs") as told:
        assert next(told)[0] == "hello"
    with pytest.raises(ConnectionRefusedError):
        get(server, "/")


def test_the_runs_that_stand_first_are_read_before_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, reading in (("a-good", "sharded"), ("b-bad", "replicated")):
        training = Training(tmp_path / name, reading=reading)
        training.steps(2)
        training.close()
    read = []
    make = board.run_content

    def noted(run: Run) -> object:
        read.append(run.path.name)
        return make(run)

    monkeypatch.setattr(board, "run_content", noted)
    monkeypatch.setattr(board, "READ_AHEAD", 1)
    pages = board.Board(tmp_path)
    pages.read_ahead()
    assert read == ["b-bad"]
    assert pages.sheet("run:b-bad") is not None
    assert read == ["b-bad"]


def test_a_run_that_comes_stalls_and_goes_while_it_is_watched(tmp_path: Path):
    now = time.time()
    clock = [now]
    pages = board.Board(tmp_path, lambda: clock[0], refresh_seconds=0)

    def main_of(topic: str) -> str:
        sheet = pages.sheet(topic)
        assert sheet is not None
        return sheet.main

    assert "No runs here yet" in main_of("runs")
    assert pages.sheet("run:late") is None
    training = Training(tmp_path / "late")
    assert "Starting" in main_of("runs")
    training.steps(4)
    assert "Running" in main_of("runs")
    assert "Running" in main_of("run:late")
    clock[0] = now + 600
    assert "Stalled" in main_of("runs")
    assert "nothing new since" in main_of("run:late")
    clock[0] = now
    shutil.rmtree(tmp_path / "late")
    assert "No runs here yet" in main_of("runs")
    gone = main_of("run:late")
    assert "its directory is not there any more" in gone
    assert "Averaged loss" in gone


def test_a_run_that_leads_out_is_not_read(tmp_path: Path):
    Training(tmp_path / "secret").steps(2)
    served = tmp_path / "served"
    shutil.copytree(tmp_path / "secret", served / "run")
    shutil.rmtree(served / "run" / "steps")
    (served / "run" / "steps").symlink_to(tmp_path / "secret" / "steps")
    pages = board.Board(served)
    for topic in ("runs", "run:run", "compare:run:run"):
        sheet = pages.sheet(topic)
        assert sheet is not None
        assert "leads out of the served directory" in sheet.main
        assert not sheet.figures.specs


# Who may see it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:9999", 200), ("127.0.0.1:1", 200), ("[::1]:8321", 200),
        ("LOCALHOST", 200), ("evil.example", 421), ("localhost.evil.example:8321", 421),
        ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421), ("[::2]", 421),
        ("localhost:80@evil.example", 421), ("[::1]x", 421),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(served: Any, host: str, status: int):
    assert get(served, "/", Host=host).status == status
    assert get(served, "/api/runs", Host=host).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_pages_are_only_to_be_read(served: Any, method: str):
    answer = get(served, "/", method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


def test_every_answer_binds_the_browser(served: Any):
    for path in ("/", "/run/good", "/nothing", "/api/runs", "/assets/x/style.css"):
        headers = get(served, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_token_is_asked_for_and_kept_in_a_cookie(tmp_path: Path):
    with serving(tmp_path, token="s3cret-ü") as server:
        assert server.url.endswith("?token=s3cret-%C3%BC")
        for path in ("/", "/api/runs", "/events?topic=runs", "/?token=wrong", "/assets/x/y"):
            refused = get(server, path)
            assert refused.status == 401
            assert "set-cookie" not in refused.headers
        entered = get(server, "/compare?a=x&token=s3cret-%C3%BC&b=%22%3E%3Cb")
        assert entered.status == 200
        assert 'content="0;url=/compare?a=x&amp;b=%22%3E%3Cb"' in entered.text
        assert "s3cret" not in entered.text
        assert "<b>" not in entered.text
        assert entered.headers["cache-control"] == "no-store"
        assert entered.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in entered.headers["content-security-policy"]
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "s3cret" not in cookie
        pair = cookie.partition(";")[0]
        assert get(server, "/", Cookie=pair).status == 200
        assert get(server, "/", Cookie=f"{pair}x").status == 401
        for path in ("//evil.example/", "/%5Cevil.example/", "/%09/evil.example/"):
            goes_on = get(server, f"{path}?token=s3cret-%C3%BC").text
            assert re.search(r"url=/(?=[\w%])[\w%./]*\"", goes_on), goes_on


@pytest.mark.parametrize(
    "others",
    ['prefs={"sidebar":true}', "theme=dark mode", "seen", "a=b=c", '"', "=", "", "ü=ü", "x=[1, 2]"],
)
def test_cookies_of_other_programs_on_this_host_do_not_matter(tmp_path: Path, others: str):
    with serving(tmp_path, token="s3cret") as server:
        pair = get(server, "/?token=s3cret").headers["set-cookie"].partition(";")[0]
        name = pair.partition("=")[0]
        for cookies in (f"{others}; {pair}", f"{pair}; {others}", f"{name}=old; {pair};{others}"):
            assert get(server, "/", Cookie=cookies).status == 200, cookies
        assert get(server, "/", Cookie=f"{others}; {name}={others}").status == 401
        assert get(server, "/", Cookie=others).status == 401


def test_other_addresses_than_loopback_get_a_token(tmp_path: Path):
    with serving(tmp_path, host="0.0.0.0") as server:
        assert len(server.token) >= 20
        assert f"?token={server.token}" in server.url
        assert get(server, "/").status == 401
        assert get(server, f"/?token={server.token}", Host="node7:80").status == 200


def test_an_address_that_is_taken_or_a_directory_that_is_not_there(tmp_path: Path):
    with serving(tmp_path) as server, pytest.raises(UsageError, match="name another port"):
        live_server(tmp_path, port=server.port)
    with pytest.raises(UsageError, match="is not there: name the directory of a run"):
        live_server(tmp_path / "nothing", port=0)
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"train\.py is a file: name the directory of a run"):
        live_server(tmp_path / "train.py", port=0)
    with pytest.raises(UsageError, match="cannot listen on"):
        live_server(tmp_path, host="nobody.invalid.", port=0)


def test_a_served_run_is_its_own_first_page(tmp_path: Path):
    training = Training(tmp_path / "sft")
    training.steps(2)
    training.close()
    with serving(tmp_path / "sft") as server:
        answer = get(server, "/")
        assert (answer.status, answer.headers["location"]) == (307, "/run/sft")
        assert "Averaged loss" in get(server, "/run/sft").text


def test_a_name_that_is_no_utf8_is_shown_as_far_as_it_can_be(tmp_path: Path):
    odd = os.fsdecode(b"mod\xe8le")
    for name in (odd, "good"):
        training = Training(tmp_path / name, name="\ud800" if name == "good" else name)
        training.steps(2)
        training.close()
    with serving(tmp_path) as server:
        addresses = ["/", "/run/good", f"/run/{id_of(odd)}", f"/compare?a=good&b={id_of(odd)}"]
        answers = [get(server, address) for address in addresses]
        news = get(server, f"/api/run/{id_of(odd)}").json
    assert [answer.status for answer in answers] == [200] * 4
    assert all("mod?le" in answer.text for answer in answers)
    assert "mod?le" in news["title"]


@pytest.mark.parametrize("token", ["\udcff", "a\0b", "x" * 100_000])
def test_a_token_that_no_browser_can_send(tmp_path: Path, token: str):
    with pytest.raises(UsageError, match="--token expected"):
        live_server(tmp_path, port=0, token=token)


@pytest.mark.parametrize("host", ["\udcff", "a\0b", "x" * 100_000, "a..b"])
def test_a_host_that_is_no_name(tmp_path: Path, host: str):
    with pytest.raises(UsageError, match="cannot listen on"):
        live_server(tmp_path, port=0, host=host)


def test_viewers_who_never_finish_a_request_are_left(tmp_path: Path):
    with serving(tmp_path, request_seconds=3.0) as server, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(300):
            viewer = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=60)
            )
            viewer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-a: ")
            slow.append(viewer)

        assert get(server, "/").status == 200
        for viewer in slow:
            with contextlib.suppress(ConnectionResetError):
                assert viewer.recv(1) == b""
        assert get(server, "/").status == 200


def test_viewers_who_never_read_an_answer_are_left(tmp_path: Path):
    script = addresses()["vega.js"]
    request = f"GET {script} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with serving(tmp_path, request_seconds=1.0) as server, contextlib.ExitStack() as stack:
        for _ in range(30):
            viewer = stack.enter_context(socket.socket())
            viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            viewer.connect(("127.0.0.1", server.port))
            viewer.sendall(40 * request)

        assert get(server, script).status == 200
        while server.server_state.connections:  # else the test's own limit ends it
            time.sleep(0.05)
        assert get(server, script).status == 200


def test_viewers_of_a_slow_run_keep_no_other_page_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    going_on = threading.Event()
    waited = []

    def slowly(run: Run) -> Any:
        waited.append(run)
        going_on.wait(60)
        return run_content(run)

    run_content = board.run_content
    monkeypatch.setattr(board, "run_content", slowly)
    Training(tmp_path / "slow").close()
    request = b"GET /api/run/slow HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(tmp_path) as server, contextlib.ExitStack() as stack:
        stack.callback(going_on.set)
        for number in range(100):
            viewer = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            stack.enter_context(viewer)
            viewer.sendall(request)
            if number % 2:
                viewer.close()  # gives up

        assert get(server, "/").status == 200
        going_on.set()
        assert get(server, "/run/slow").status == 200
        assert len(waited) == 1


def test_of_too_many_viewers_the_first_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    with serving(tmp_path) as server, contextlib.ExitStack() as stack:
        viewers = []
        for _ in range(20):
            viewer = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=60)
            )
            viewer.sendall(b"GET /events?topic=runs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert viewer.recv(15) == b"HTTP/1.1 200 OK"
            viewers.append(viewer)

        for viewer in viewers[:12]:
            with contextlib.suppress(ConnectionResetError):
                while viewer.recv(4096):
                    pass
        assert get(server, "/").status == 200
        assert len(server.server_state.connections) <= 8
