"""The preflight: what can be checked in seconds, under the launcher, before a training starts."""

from rankscope.doctor.preflight import run_preflight
from rankscope.doctor.result import CheckResult, Status, worst
from rankscope.doctor.stage import Options

__all__ = ["CheckResult", "Options", "Status", "run_preflight", "worst"]
