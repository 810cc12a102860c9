"""Every detector takes part in a diagnosis."""

import importlib
import pkgutil

from rankscope import evidence
from rankscope.bus.detector import Detector, RunFacts
from rankscope.verdict.diagnosis import Diagnosis


def below(kind):
    return [each for one in kind.__subclasses__() for each in (one, *below(one))]


def takes_steps(kind):
    """Return whether a class is a detector itself, and no base of others."""
    inherited = Detector.observe, Detector.observe_step
    return (kind.observe, kind.observe_step) != inherited


def test_every_detector_is_asked():
    for module in pkgutil.walk_packages(evidence.__path__, f"{evidence.__name__}."):
        importlib.import_module(module.name)
    asked = {type(detector) for detector in Diagnosis(RunFacts(4))._detectors}
    known = {
        kind
        for kind in below(Detector)
        if kind.__module__.startswith("rankscope.") and takes_steps(kind)
    }
    assert known == asked
