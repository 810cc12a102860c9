import dataclasses
import inspect
import re
from pathlib import Path

import duckdb
import numpy as np
import pytest

import rankscope
from rankscope.agent.frames import FrameKind, pack
from rankscope.agent.step_message import StepMessage, pack_values
from rankscope.bus.detector import RULES
from rankscope.bus.evidence import Table
from rankscope.bus.gradient_part import sizes_of
from rankscope.evidence import columns_of
from rankscope.session.instruments import GROUP_WIDTH
from rankscope.stats.audit import AUDIT_WIDTH
from rankscope.verdict.rules import page_of_causes
from record.run_files import write
from record.step_reports import make_report

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
RUNS = (ROOT / "docs" / "runs.md").read_text()
TIERS = (ROOT / "docs" / "tiers.md").read_text()
CAUSES = (ROOT / "docs" / "causes.md").read_text()
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text()
NO_COLUMNS = {
    *("data_digest", "data_splits", "drawn_from_others", "drawn_from_own", "innocent_probability"),
    *("communication_data_type", "found_inf", "fully_shard", "input_ids", "max_norm", "no_sync"),
    *("num_batches_tracked", "num_replicas", "num_workers", "prepare_data_loader", "state_dict"),
    *("overlap_comm", "reduce_dtype", "requires_grad", "set_epoch", "set_gradient_divide_factor"),
    *("split_by_node", "split_by_worker", "split_dataset_by_node", "worker_init_fn"),
    *("after_complete", "data_fields", "zero_grad", "zero_grad_buffer"),
}
"""What else the pages on causes and evidence write like a column: numbers of findings, and options
of torch and others."""
TIER_ROWS = ("`scalars`", "`sketch`")


def section(page, title):
    [text] = re.findall(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", page, re.M | re.S)
    return text


def table_rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for i, row in enumerate(cells) if not {*cells[i][0]} <= {"-"} and i not in (0, 1)]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page):
    folders = "tests|benchmarks|examples|src"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_queries_run_on_a_run(tmp_path):
    reports = [make_report(step, micro=2, groups=True) for step in range(130)]
    write(tmp_path, reports).close()  # long enough for rows of the roll-ups
    queries = re.findall(r"^```sql\n(.*?)^```", RUNS, re.M | re.S)
    queries += re.findall(r'duckdb -c "(.*)"', RUNS)
    assert len(queries) == 3
    for query in queries:
        assert duckdb.sql(query.replace("RUN/", f"{tmp_path}/")).fetchall()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_watch_that_are_named_exist(page):
    rarer = {field.name for field in dataclasses.fields(rankscope.WatchOptions)}
    options = inspect.signature(rankscope.watch).parameters.keys() | rarer
    for name in re.findall(r"`(?:rankscope\.)?watch\((?:…, )?(\w+)=", page.read_text()):
        assert name in options


def test_the_page_of_causes_is_made_from_the_findings():
    assert page_of_causes() == CAUSES, "rankscope causes --page > docs/causes.md"


def test_the_overview_lists_every_cause_once_with_its_severities():
    rows = [row for row in table_rows(CAUSES) if row[0].startswith("[")]
    assert sorted([row[0], row[3]] for row in rows) == sorted(
        [f"[`{cause}`](#{cause.replace('.', '')})", ", ".join(map(str, rule.advice))]
        for cause, rule in RULES.items()
    )


@pytest.mark.parametrize("cause", RULES)
def test_a_section_says_what_a_cause_looks_like_where_it_comes_from_and_what_to_do(cause):
    parts = re.findall(r"^\*\*(.+?):\*\*", section(CAUSES, f"`{cause}`"), re.M)
    assert [parts[0], parts[-1], len(parts)] == ["Looks like", "Do", 3]
    assert parts[1] in ("In practice", "May come from", "Comes from")


def test_columns_that_causes_and_evidence_speak_of_exist():
    columns = [signal for table in Table for signal in columns_of(table)]
    known = {signal.name for signal in columns}
    known |= {f"{signal.name}_in_words" for signal in columns if signal.bits}
    assert set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", CAUSES + EVIDENCE)) - known <= NO_COLUMNS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_columns_are_in_the_tables_that_pages_name(page):
    column, table = r"`[a-z_]+`", r"`(" + "|".join(Table) + r")`"
    named = rf"({column}(?:(?:, | and ){column})*) of {table}"
    for columns, of in re.findall(named, page.read_text()):
        names = re.findall(r"[a-z_]+", columns.replace(" and ", " "))
        assert {*names} <= {signal.name for signal in columns_of(Table(of))}, (columns, of)


def message(tier, num_workers, num_groups):
    """Return a step as a worker sends it: 8 samples, one loss, 32 digests, a section per group."""
    sketches = tier != "scalars"
    rows = dict.fromkeys(("squares", "reduced_squares"), num_groups)
    ones = ("largest", "nonfinite") if sketches else ("largest", "nonfinite", "product")
    numbers = {**rows, **dict.fromkeys(ones, 1)}
    assert GROUP_WIDTH == AUDIT_WIDTH  # so that a group needs no sketch of its own
    parts = {"total": 4093, **dict.fromkeys(("local", "reduced"), AUDIT_WIDTH * num_groups)}
    widths = parts if sketches else {}
    return StepMessage(
        step=0,
        slots=np.frombuffer(pack_values({}), np.int64),
        losses_U=np.ones(1),
        weights_U=np.ones(1),
        units_M=np.ones(1, np.int64),
        multipliers_M=np.ones(1),
        samples_B=np.arange(8),
        digests_D=np.arange(32),
        unchanged_D=np.zeros(32, np.uint8),
        numbers=np.ones(sum(numbers.values())),
        sizes=np.array(sizes_of(numbers, widths, norm_estimated=False)),
        sketches=np.ones(sum(widths.values()), np.float32),
    )


def test_bytes_of_the_tiers():
    tiers = [row for row in table_rows(section(TIERS, "Bytes")) if row[0] in TIER_ROWS]
    assert len(tiers) == 2
    for name, *cells in tiers:
        sizes = []
        for num_workers in (8, 64):
            sent = message(name.strip("`"), num_workers, 27)
            sizes.append(len(pack(FrameKind.STEP, sent.pack())))
        assert cells == [f"{size:,}" for size in sizes]
