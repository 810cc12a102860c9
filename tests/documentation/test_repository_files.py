"""The files that the platform reads: valid, and true to this project."""

import tomllib

import pytest
import yaml

from documentation.blocks import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"


def test_what_is_cited_is_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], cited["version"]) == (PROJECT["name"], PROJECT["version"])
    assert (cited["license"], cited["abstract"]) == (PROJECT["license"], PROJECT["description"])


@pytest.mark.parametrize("path", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda p: p.name)
def test_a_template_asks_for_something(path):
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert form["name"]
        assert all(field["attributes"]["label"] for field in form["body"])


def test_a_release_is_checked_before_it_is_published():
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert (ROOT / ".ci" / "run").exists()
    assert commands.index(".ci/run") < next(n for n, c in enumerate(commands) if "-m build" in c)
    assert jobs["publish"]["needs"] == "build"
