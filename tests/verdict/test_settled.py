"""A canary answers the question that an outlier leaves open; advice says so."""

from rankscope.bus.bundles import latest_bundle
from rankscope.bus.detector import RULES
from rankscope.bus.finding import Finding, FindingEvent, Severity
from rankscope.verdict.news import Announcer
from rankscope.verdict.rules import cause_pages, next_check_of, settled_by

OUTLIER = Finding(
    "outlier-2", "data.worker_outlier", Severity.WARNING, (2,), 20, 60, "It differs.", "Swap.", {}
)
CANARY = Finding(
    *("canary-data", "data.worker_outlier", Severity.NOTE, (2,), 64, 64),
    "The canary agrees: the data differ. More of it.",
    "Look at the batch.",
    {},
)


def test_a_canary_settles_what_to_do_about_an_outlier():
    assert next_check_of(OUTLIER, [OUTLIER]) == "Swap."
    assert settled_by(OUTLIER, [OUTLIER, CANARY]) == CANARY
    advice = "The canary agrees: the data differ. Look at the batch."
    assert next_check_of(OUTLIER, [CANARY, OUTLIER]) == advice


def test_the_answer_is_told_while_the_training_goes_on():
    said: list[str] = []
    announcer = Announcer(lambda line, fault: said.append(line))
    announcer.announce([(CANARY, FindingEvent.OPENED)], [CANARY])
    assert said == []  # a note, about nothing that was told
    announcer.announce([(OUTLIER, FindingEvent.OPENED)], [OUTLIER])
    announcer.announce([(CANARY, FindingEvent.OPENED)], [OUTLIER, CANARY])
    assert said[1].startswith("note: The canary agrees: the data differ.")


def test_the_latest_bundle_of_a_finding(tmp_path):
    for name in ("rank-2-step-9", "rank-2-step-66", "rank-3-step-70", "scheduled-step-100"):
        (tmp_path / "replay" / name).mkdir(parents=True)
        (tmp_path / "replay" / name / "bundle.json").touch()
    replay = tmp_path / "replay"
    assert latest_bundle(tmp_path, {"rank-2"}) == replay / "rank-2-step-66"
    assert latest_bundle(tmp_path, {"canary-data"}, until=75) == replay / "rank-3-step-70"
    assert latest_bundle(tmp_path, {"rank-1"}) is None
    assert latest_bundle(tmp_path / "none", {"rank-1"}, until=9) is None
    assert latest_bundle(tmp_path, {"rank-2"}, over_by=50) == replay / "rank-2-step-9"


def test_every_rule_has_its_page_in_the_package():
    pages = cause_pages()
    assert pages.keys() >= RULES.keys()
    for name in RULES:
        assert "**Looks like:**" in pages[name]
        assert "**Do:**" in pages[name]
        assert "](" not in pages[name].replace("](http", "")
