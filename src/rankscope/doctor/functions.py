"""Finds the functions that the user names, before anything is built with them."""

from collections.abc import Sequence

from rankscope.doctor.result import CheckResult, Facts, Status
from rankscope.doctor.stage import Bench, Options, Stage
from rankscope.doctor.user_code import find_function

_BLOCKS = {"model": "model", "optimizer": "model", "loader": "loader"}
"""The stage that each function is for."""


def stages(options: Options) -> list[Stage]:
    """Return one stage per function that is named; it says nothing when all is well."""
    return [_stage(option) for option in _BLOCKS if getattr(options, option)]


def not_asked(option: str, title: str) -> Stage:
    """Return a stage that says that its checks are skipped since an option was not given."""

    def judge(facts: Sequence[Facts]) -> list[CheckResult]:
        found = f"not asked for: give --{option} MODULE:FUNCTION"
        return [CheckResult(option, title, Status.SKIPPED, found)]

    return Stage(option, title, _nothing, judge, needs_group=False)


def _stage(option: str) -> Stage:
    def look(bench: Bench) -> Facts:
        name = getattr(bench.options, option)
        bench.functions[option] = find_function(f"--{option}", name)
        return {}

    return Stage(
        topic=f"{option}_function",
        title=f"Function of --{option}",
        look=look,
        judge=lambda facts: [],
        needs_group=False,
        blocks=(_BLOCKS[option],),
        advice="The module must be importable on every host, and importing it must not start a "
        "training: keep that under if __name__ == '__main__'.",
    )


def _nothing(bench: Bench) -> Facts:
    return {}
