"""The documentation against what it tells of: columns, links, queries, options and bytes."""

import ast
import inspect
import re
from pathlib import Path

import duckdb
import pytest

import rankscope
from rankscope.core.signals import Table, signals
from rankscope.exchange import Layout
from rankscope.instruments import GROUP_WIDTH
from record.run_files import write
from record.step_reports import make_report

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
RUNS = (ROOT / "docs" / "runs.md").read_text()
TIERS = (ROOT / "docs" / "tiers.md").read_text()


def section(page, title):
    """Return the text under a heading, up to the next heading."""
    [text] = re.findall(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", page, re.M | re.S)
    return text


def table_rows(text):
    """Return the rows of all Markdown tables in a text as lists of cells, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for i, row in enumerate(cells) if not {*cells[i][0]} <= {"-"} and i not in (0, 1)]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


@pytest.mark.parametrize("table", Table)
def test_every_column_of_every_table_is_documented_and_no_other(table):
    expected = [[f"`{s.name}`", f"`{s.dtype}`", s.unit, s.meaning] for s in signals(table)]
    rows = table_rows(section(RUNS, table))
    assert rows == expected, "put these lines there:\n" + "\n".join(
        f"| {' | '.join(row)} |".replace("|  |", "| |") for row in expected
    )


def test_every_table_is_named_among_the_files():
    paths = [row[0] for row in table_rows(section(RUNS, "The run directory"))]
    for table in Table:
        assert f"[`{table}/*.parquet`](#{table})" in paths


def anchors(page):
    """Return what headings can be linked to by, as GitHub makes it of their text."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def test_queries_run_on_a_run(tmp_path):
    write(tmp_path, [make_report(step, micro=2, groups=True) for step in range(3)])
    queries = [*blocks(RUNS, "sql"), *re.findall(r'duckdb -c "(.*)"', RUNS)]
    assert len(queries) == 2
    for query in queries:
        assert duckdb.sql(query.replace("RUN/", f"{tmp_path}/")).fetchall()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_valid_and_its_options_exist(page):
    options = inspect.signature(rankscope.watch).parameters
    text = page.read_text()
    for code in blocks(text, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "rankscope.watch":
                assert {keyword.arg for keyword in node.keywords} <= options.keys()
    for name in re.findall(r"`(?:rankscope\.)?watch\((?:…, )?(\w+)=", text):
        assert name in options


def message(tier, num_workers, num_groups):
    """Return the layout of a message, as ``watch`` makes it by default."""
    sketches = tier != "scalars"
    return Layout(
        sketch_width=4093 * sketches,
        groups=tuple(f"layers.{index}" for index in range(num_groups)),
        group_width=GROUP_WIDTH * sketches,
        gram_size=num_workers * (num_workers + 1) // 2 if tier == "exact" else 0,
    )


def test_bytes_of_the_tiers():
    parts = table_rows(section(TIERS, "Bytes"))
    fixed = int(parts[0][1].replace(",", ""))
    assert fixed == Layout(sketch_width=0).without_gradient().num_bytes
    rows = [row for row in parts if row[0] in ("`scalars`", "`sketch`", "`exact`")]
    assert len(rows) == 3
    for row in rows:
        tier, expected = row[0].strip("`"), []
        for num_workers in (8, 64):
            size = message(tier, num_workers, 27).num_bytes
            sketches = 4 * 4093 + 1004 * 27 if tier != "scalars" else 0
            gram = 4 * num_workers * (num_workers + 1) if tier == "exact" else 0
            assert size == fixed + 8 * 27 + sketches + gram  # the formulas of the first table
            expected += [f"{size:,}", f"{(num_workers - 1) * size:,}"]
        assert row[1:] == expected
