"""The preflight: checks that take seconds, under the launcher, before a training starts."""

from rankscope.tools.doctor.preflight import run_preflight
from rankscope.tools.doctor.stage import CheckResult, Options, Status, worst

__all__ = ["CheckResult", "Options", "Status", "run_preflight", "worst"]
