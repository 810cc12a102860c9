from rankscope.lab.study.config import Setting, StudyConfig
from rankscope.verdict.coverage import checks_of, missing_steps


def test_the_default_steps_complete_every_check() -> None:
    config = StudyConfig()
    checks = checks_of(config.workers, {})
    assert missing_steps(checks, config.steps) == 0
    assert missing_steps(checks, config.steps - 1) == 1


def test_seeds_of_the_settings() -> None:
    assert {Setting.S1_1.seed_of(rank, 5) for rank in range(8)} == {5}
    odd, *others = (Setting.S1_2.seed_of(rank, 5) for rank in range(8))
    assert odd != 5
    assert set(others) == {5}
    assert len({Setting.S1_3.seed_of(rank, 5) for rank in range(1024)}) == 1024
