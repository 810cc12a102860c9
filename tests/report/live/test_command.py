import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rankscope.errors import MissingExtraError, install_command
from rankscope.report.live import live_server

SERVE = [sys.executable, "-m", "rankscope", "serve"]


def test_it_says_where_it_is_and_ends_at_once_when_asked(tmp_path: Path):
    with subprocess.Popen(
        [*SERVE, str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
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
    for name in [
        name for name in sys.modules if name.startswith(("rankscope.report.", f"{package}."))
    ]:
        if name != "rankscope.report.live":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("serve"))):
        live_server(tmp_path, port=0)
