"""Ways to write a run directory, and to read it with other tools."""

import json

import duckdb
import pandas as pd
import polars as pl

from rankscope.bus.finding import Finding, Severity
from rankscope.record import Run, RunWriter


def make_finding(identity="data.duplicate_batches", **changes):
    values = {
        "id": identity,
        "cause": "data.duplicate_batches",
        "severity": Severity.ERROR,
        "ranks": (0, 1),
        "first_step": 3,
        "last_step": 9,
        "explanation": "Ranks 0 and 1 train on the same batches – “equal”.",
        "next_check": "Compare the samplers' seeds.",
    }
    return Finding(**(values | changes))


def write(path, reports):
    run = RunWriter(path, {})
    for report in reports:
        run.add(report)
    run.flush()
    return run


def record(path, reports, flush_every=None):
    writer = RunWriter(path, {})
    for number, report in enumerate(reports, start=1):
        writer.add(report)
        if flush_every and number % flush_every == 0:
            writer.flush()
    writer.close()
    return Run.open(path)


def read_info(path):
    return json.loads((path / "run.json").read_text())


def duckdb_rows(path, table):
    relation = duckdb.sql(f"select * from '{path}/{table}/*.parquet'")
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def pandas_rows(path, table):
    frame = pd.read_parquet(path / table, dtype_backend="pyarrow").astype(object)
    return frame.where(frame.notna(), None).to_dict("records")


def polars_rows(path, table):
    return pl.read_parquet(f"{path}/{table}/*.parquet").to_dicts()


ROWS_OF = (duckdb_rows, pandas_rows, polars_rows)


def files_of(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
