import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from rankscope.errors import MissingExtraError, RunError, install_command
from rankscope.report.live import board, catalog, live_server
from rankscope.report.live.catalog import MAX_DEPTH, ListedPlace, id_of, places, stamp
from report.html_reader import Page
from report.live.serving import Training, events, get, serving

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
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


def test_a_page_of_a_run_holds_what_the_report_holds(served):
    answer = get(served, "/run/good")
    page = Page(answer.text)

    assert answer.status == 200
    assert answer.headers["content-encoding"] == "gzip"
    assert {"loss", "loss_std", "heatmap", "workers-loss"} <= set(page.figures)
    assert set(page.figures) == set(page.specs)
    assert "Too early Too short to judge" in page.words
    assert "Complete" in page.words


@pytest.mark.parametrize("path", ["/", "/run/good", "/api/run/good", "/nothing"])
def test_who_takes_no_compressed_answer_gets_a_plain_one(served, path):
    plain = get(served, path, accept_encoding="identity")
    packed = get(served, path)
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert plain.status == packed.status
    assert plain.text == packed.text


@pytest.mark.parametrize(
    "path",
    [
        "/run/..", "/run/%2e%2e/%2e%2e/etc", "/run/good/..", "/assets/..%2f..%2fetc/passwd",
        "/api/run/..", "/events",
    ],
)  # fmt: skip
def test_nothing_else_is_reachable(served, path):
    answer = get(served, path)
    assert answer.status == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize(("name", "words"), [("broken", "damaged"), ("half", "damaged")])
def test_a_damaged_run_says_so_calmly(served, name, words):
    answer = get(served, f"/run/{name}")
    page = Page(answer.text)

    assert answer.status == 200
    assert f"{name} cannot be read" in page.words
    assert words in page.words
    assert str(served.root) not in page.words
    assert "Traceback" not in answer.text


def test_a_flush_is_pushed_to_those_who_listen(tmp_path):
    training = Training(tmp_path / "run")
    training.steps(2)
    with serving(tmp_path) as live, events(live, "run:run") as told, events(live, "runs") as runs:
        assert next(told) == ("hello", "run:run")
        assert next(runs) == ("hello", "runs")
        name, version = next(told)
        next(runs)
        assert name == "news"
        assert version == get(live, "/api/run/run").json["version"]
        training.steps(2)
        name, newer = next(told)
        assert (name, newer != version) == ("news", True)
        while newer != get(live, "/api/run/run").json["version"]:
            name, newer = next(told)  # the first look came in the middle of the flush
            assert name == "news"
        assert next(runs)[0] == "news"
        training.close()
        assert next(told)[0] == "news"
        assert "Complete" in get(live, "/api/run/run").json["main"]


def test_a_run_that_comes_stalls_and_goes_while_it_is_watched(tmp_path):
    now = time.time()
    clock = [now]
    pages = board.Board(tmp_path, lambda: clock[0], refresh_seconds=0)

    def main_of(topic):
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


def test_a_run_that_leads_out_is_not_read(tmp_path):
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
        ("localhost", 200), ("[::1]:8321", 200), ("evil.example", 421), ("10.0.0.1", 421),
        ("localhost.evil.example:8321", 421), ("localhost:80@evil.example", 421),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(served, host, status):
    assert get(served, "/", Host=host).status == status
    assert get(served, "/api/runs", Host=host).status == status


def test_a_token_is_asked_for_and_kept_in_a_cookie(tmp_path):
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


def test_other_addresses_than_loopback_get_a_token(tmp_path):
    with serving(tmp_path, host="0.0.0.0") as server:
        assert len(server.token) >= 20
        assert f"?token={server.token}" in server.url
        assert get(server, "/").status == 401
        assert get(server, f"/?token={server.token}", Host="node7:80").status == 200


def test_a_name_that_is_no_utf8_is_shown_as_far_as_it_can_be(tmp_path):
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


def test_viewers_who_never_finish_a_request_are_left(tmp_path):
    with serving(tmp_path, request_seconds=3.0) as server, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(300):
            viewer = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            stack.enter_context(viewer)
            viewer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-a: ")
            slow.append(viewer)

        assert get(server, "/").status == 200
        for viewer in slow:
            with contextlib.suppress(ConnectionResetError):
                assert viewer.recv(1) == b""
        assert get(server, "/").status == 200


def run_at(path):
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_runs_are_found_at_any_depth_and_named_by_their_paths(tmp_path):
    for name in ("a", "study/runs/s1-1", "study/runs/s1-2", ".hidden/run", "a/inside"):
        run_at(tmp_path / name)
    run_at(tmp_path.joinpath(*"123456"[: MAX_DEPTH - 1], "deep"))
    run_at(tmp_path.joinpath(*"abcdef"[:MAX_DEPTH], "too-deep"))

    found, cut = places(tmp_path)
    assert not cut
    assert set(found) == {"a", "study/runs/s1-1", "study/runs/s1-2", "1/2/3/4/5/deep"}
    assert found["study/runs/s1-2"].path == tmp_path / "study/runs/s1-2"


def test_many_folders_of_data_hide_no_run_beside_them(tmp_path, monkeypatch):
    for number in range(60):
        (tmp_path / "data/train" / f"n{number:08}" / "images").mkdir(parents=True)
    runs = [f"runs/exp-{n}/2026/november/seed-0" for n in range(3)]
    for name in (*runs, "zz/run", "data/train/n00000059/run"):
        run_at(tmp_path / name)
    assert places(tmp_path).cut is False
    assert len(places(tmp_path).places) == 5

    monkeypatch.setattr(catalog, "MAX_DIRECTORIES", 30)
    found, cut = places(tmp_path)
    assert cut
    assert list(found) == ["zz/run", *runs]


@pytest.mark.parametrize(
    "part",
    [
        *("run.json", "findings.jsonl", "detectors-start.npz", "steps", "rollups/samples"),
        *("steps/part-000000.parquet", "rollups/samples/part-000000.parquet"),
    ],
)
def test_a_part_that_leads_out_of_the_directory_is_refused(tmp_path, part):
    served = tmp_path / "served"
    run = run_at(served / "run")
    secret = tmp_path / "secret"
    secret.mkdir() if "." not in part else secret.write_text("{}")
    (run / part).parent.mkdir(exist_ok=True, parents=True)
    (run / part).unlink(missing_ok=True)
    (run / part).symlink_to(secret)

    with pytest.raises(RunError, match="leads out of the served directory"):
        stamp(ListedPlace("run", run, "run"), served)
    (run / part).unlink()
    inside = served / "kept"
    inside.mkdir() if "." not in part else inside.write_text("{}")
    (run / part).symlink_to(inside)
    assert stamp(ListedPlace("run", run, "run"), served) is not None


SERVE = [sys.executable, "-m", "rankscope", "serve"]


def test_it_says_where_it_is_and_ends_at_once_when_asked(tmp_path: Path):
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    command = [*SERVE, str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, text=True, **pipes) as started:
        assert started.stdout is not None
        first = started.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:(\d+)/", first)
        assert address, first
        assert "Ctrl-C" in started.stdout.readline()
        place = f"{address[0]}events?topic=runs"
        with urllib.request.urlopen(place, timeout=60) as stream:
            assert stream.readline().decode().strip() == "event: hello"
        started.send_signal(signal.SIGINT)
        rest, complaints = started.communicate(timeout=120)
    assert started.returncode == 130
    assert "Traceback" not in rest + complaints


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_the_extra_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in list(sys.modules):
        parts = name.startswith(("rankscope.report.", f"{package}."))
        if parts and name != "rankscope.report.live":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("serve"))):
        live_server(tmp_path, port=0)
