"""Pages and figures over records: one self-contained HTML file per run or study, PNG figures.

They need the extra ``web``; importing this package does not. Functions of this package raise a
MissingExtraError where it is not installed, and a RunError where a run cannot be read or a file
cannot be written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.errors import MissingExtraError
from rankscope.record import Run

_EXTRAS = (
    *("jinja2", "markdown_it", "markupsafe", "vl_convert"),
    *("starlette", "uvicorn", "sse_starlette", "anyio"),
)

__all__ = [
    "write_comparison",
    "write_figures",
    "write_report",
    "write_run_figures",
    "write_study_report",
]


def write_report(run: Run, path: Path | None = None) -> Path:
    """Write a run's page, by default ``report.html`` in its directory, and return its path."""
    with needs_extra("report.html", "web"):
        from rankscope.report.page import write_run_page
    return write_run_page(run, path)


def write_comparison(run_a: Run, run_b: Run, path: Path) -> Path:
    """Write a page that shows two runs side by side, and return its path."""
    with needs_extra(path.name, "web"):
        from rankscope.report.compare import write_compare_page
    return write_compare_page(run_a, run_b, path)


def write_study_report(study_dir: Path, path: Path | None = None) -> Path:
    """Write a study's page, by default ``report.html`` in its directory, and return its path."""
    with needs_extra("report.html", "web"):
        from rankscope.report.study_page import write_study_page
    return write_study_page(Path(study_dir), path)


def write_figures(study_dir: Path, folder: Path | None = None) -> list[Path]:
    """Write a study's PNG files, by default into its directory ``figures``; return their paths.

    They are ``averaged-loss.png``, ``metrics.png`` and ``cosine-heatmap.png``.
    """
    with needs_extra("a study's figures", "web"):
        from rankscope.report.study_page import write_study_figures
    return write_study_figures(Path(study_dir), folder)


def write_run_figures(run: Run, folder: Path | None = None) -> list[Path]:
    """Write a run's PNG files, by default into its directory ``figures``, and return their paths.

    They are ``overview.png``, ``workers.png`` and ``model.png``; those without data are left out.
    """
    with needs_extra("a run's figures", "web"):
        from rankscope.report.page import write_run_pictures
        from rankscope.verdict.assessment import assess
    return write_run_pictures(run, assess(run), folder or Path(run.path) / "figures")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Raise a MissingExtraError that names the extra where an import in this block lacks it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRAS:
            raise MissingExtraError(what, extra) from error
        raise
