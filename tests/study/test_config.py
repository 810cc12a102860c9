from rankscope.lab.study.config import StudyConfig
from rankscope.verdict.coverage import checks_of, missing_steps


def test_the_default_steps_complete_every_check() -> None:
    config = StudyConfig()
    checks = checks_of(config.workers, {})
    assert missing_steps(checks, config.steps) == 0
    assert missing_steps(checks, config.steps - 1) == 1
