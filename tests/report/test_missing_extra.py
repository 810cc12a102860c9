import re
import sys
from pathlib import Path

import pytest

from rankscope.errors import MissingExtraError, install_command
from rankscope.record import Run
from rankscope.report import write_figures, write_report, write_study_report


@pytest.fixture
def without_jinja(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rankscope.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)


@pytest.mark.usefixtures("without_jinja")
def test_pages_and_figures_name_the_extra(healthy_run: Run, study: Path):
    command = re.escape(install_command("web"))
    with pytest.raises(MissingExtraError, match=rf"report\.html needs .*{command}"):
        write_report(healthy_run)
    with pytest.raises(MissingExtraError, match=command):
        write_study_report(study)
    with pytest.raises(MissingExtraError, match=command):
        write_figures(study)
