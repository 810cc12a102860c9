import pytest

from report.recorded_runs import record_run, record_study, with_everything


@pytest.fixture(scope="session")
def healthy_run(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("healthy") / "sft")


@pytest.fixture(scope="session")
def long_healthy_run(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("long") / "sft", num_steps=64)


@pytest.fixture(scope="session")
def copied_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("copied") / "sft"
    return record_run(place, reading="replicated", setting="s1-2")


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    return record_study(tmp_path_factory.mktemp("study") / "first", num_steps=12)


@pytest.fixture(scope="session")
def rich_run(tmp_path_factory):
    place = tmp_path_factory.mktemp("rich") / "sft"
    return record_run(place, num_workers=5, num_steps=40, change=with_everything)
