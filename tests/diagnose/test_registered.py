"""Every detector takes part in a diagnosis."""

import importlib
import inspect
import pkgutil

from rankscope import evidence
from rankscope.bus.detector import Detector
from rankscope.bus.run import RunFacts
from rankscope.verdict.diagnosis import Diagnosis


def concrete(kind):
    below = [each for one in kind.__subclasses__() for each in concrete(one)]
    return below if inspect.isabstract(kind) else [kind, *below]


def test_every_detector_is_asked():
    for module in pkgutil.walk_packages(evidence.__path__, f"{evidence.__name__}."):
        importlib.import_module(module.name)
    asked = {type(detector) for detector in Diagnosis(RunFacts(4))._detectors}
    known = {kind for kind in concrete(Detector) if kind.__module__.startswith("rankscope.")}
    assert known == asked
