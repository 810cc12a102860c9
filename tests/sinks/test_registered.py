"""A sink has one name in messages, in the table of what makes it, and in the documentation."""

import re
from pathlib import Path

from rankscope.sinks import specs

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "trackers.md"


def test_every_sink_has_a_form_and_a_line_in_the_documentation():
    forms = [re.match(r"[a-z]+", form)[0] for form in specs.FORMS]
    assert forms == list(specs._KINDS)
    assert specs._PACKAGES.keys() | specs._IN_TRAINING <= set(forms)
    page = PAGE.read_text()
    for form in specs.FORMS:
        without, whole = re.sub(r"\[.*?\]", "", form), re.sub(r"[\[\]]", "", form)
        names = ", ".join(f'`"{name}"`' for name in dict.fromkeys((without, whole)))
        assert f"| {names} |" in page
