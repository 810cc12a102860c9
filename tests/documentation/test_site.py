import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml
from typer.testing import CliRunner

from documentation.blocks import ROOT
from rankscope.bus.detector import RULES
from rankscope.bus.evidence import Table
from rankscope.cli.main import app
from rankscope.evidence import columns_of

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(folder):
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "WARNING" not in ended.stderr
    return folder


class Page(HTMLParser):
    """Collects what a page loads by itself, and its headings' text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag in LOADS and values.get("rel") != "canonical":
            self.loads.append(values.get(LOADS[tag]) or "")


def test_no_page_loads_anything_from_outside(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(RULES)
    for path in pages:
        assert [url for url in Page(path.read_text()).loads if "//" in url] == [], path.name
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*['\"]?(\w+:)?//", path.read_text()) == [], path.name


def test_every_finding_has_a_page_of_its_own(site):
    overview = (site / "causes.html").read_text()
    for name, rule in RULES.items():
        page = (site / "causes" / f"{name.replace('.', '')}.html").read_text()
        for heading in (rule.title, "How it looks", "What to do"):
            assert heading in page, f"{name}: {heading}"
        assert f'href="causes/{name.replace(".", "")}.html"' in overview


def test_every_page_can_be_reached_from_the_navigation(site):
    navigation = (site / "index.html").read_text()
    for path in ROOT.glob("docs/**/*.md"):
        place = path.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        link = place.replace("index.html", "") if place != "index.html" else place
        assert link in navigation, place


def test_every_command_is_in_the_reference(site):
    page = (site / "reference" / "cli.html").read_text()
    for command in app.registered_commands:
        assert f"rankscope {command.name or command.callback.__name__.rstrip('_')}" in page
    assert "--fail-on" in page


@pytest.mark.parametrize("table", Table)
def test_every_column_of_the_record_is_explained_and_no_other(site, table):
    page = (site / "runs.html").read_text()
    [text] = re.findall(rf'<h3 id="{table}">(.*?)(?=<h3|</article>)', page, re.S)
    cells = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>(.*?)</tr>", text, re.S)
    assert [name for name, _ in cells] == [s.name for s in columns_of(table)]
    for (_, cell), signal in zip(cells, columns_of(table), strict=True):
        assert html.escape(signal.meaning, quote=False) in cell


FOLDER = ROOT / "examples" / "cluster"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def instructions():
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


@pytest.mark.parametrize("name", ["sft.sbatch", "nccl.sbatch"])
def test_the_batch_script_is_one_that_bash_reads(name):
    script = FOLDER / name
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # Slurm reads none after that


def test_the_job_starts_its_script_under_rankscope_in_every_pod():
    job, policy = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    labels = policy["spec"]["podSelector"]["matchLabels"]
    for replica in replicas.values():
        assert replica["template"]["metadata"]["labels"] == labels
        (container,) = replica["template"]["spec"]["containers"]
        assert container["command"][:4] == ["torchrun", "-m", "rankscope", "run"]
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", ["sft.sbatch", "pytorchjob.yaml"])
def test_what_they_ask_of_rankscope_is_something_that_it_takes(name):
    text = (FOLDER / name).read_text()
    known = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    asked = re.search(r"rankscope,? run,? (--[a-z-]+)", text)
    assert asked is not None
    assert asked.group(1) in known


def test_the_image_is_made_of_files_and_extras_that_there_are():
    words = [word for word, _ in instructions()]
    assert words[:2] == ["ARG", "FROM"]
    assert set(words) <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR"}
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
    (extras,) = re.findall(r"rankscope\[(.+?)\]", DOCKERFILE)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
