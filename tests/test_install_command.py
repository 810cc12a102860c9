"""The command that installs an extra works for the way in which rankscope itself was installed."""

import json
from types import SimpleNamespace

import pytest

from rankscope import errors


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rankscope[web]'"),
        ("{", "pip install 'rankscope[web]'"),
        ({"url": "file://{}", "dir_info": {}}, "pip install '{}[web]'"),
        (
            {"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'rankscope[web] @ git+https://example.org/r.git'",
        ),
        (
            {"url": "file:///tmp/no such/rankscope.whl", "archive_info": {}},
            "pip install 'rankscope[web] @ file:///tmp/no such/rankscope.whl'",
        ),
    ],
    ids=["an index", "damaged", "a folder", "git", "a wheel"],
)
def test_an_extra_comes_from_where_the_rest_came_from(monkeypatch, tmp_path, origin, command):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    text = origin if origin is None or isinstance(origin, str) else json.dumps(origin)
    told = None if text is None else text.replace("file://{}", folder.as_uri())
    installed = SimpleNamespace(read_text=lambda name: told)
    monkeypatch.setattr(errors.metadata, "distribution", lambda name: installed)
    assert errors.install_command("web") == command.format(folder)
