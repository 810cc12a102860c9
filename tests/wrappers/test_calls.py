"""Listeners around a function are called while they live, whenever garbage is collected."""

import gc
import weakref
from types import SimpleNamespace

from rankscope.wrappers import calls
from rankscope.wrappers.calls import Relay


class Owner:
    """A class whose function is relayed."""

    def work(self):
        return "done"


class Listener:
    """Counts calls; as garbage it is found by a collection alone."""

    def __init__(self):
        self.count = 0
        self.itself = SimpleNamespace(me=self)

    def see(self, *args):
        self.count += 1


def test_a_collection_that_ends_the_last_subscription_does_not_end_the_next(monkeypatch):
    def collect_first(method):
        gc.collect()
        return weakref.WeakMethod(method)

    collecting = SimpleNamespace(WeakMethod=collect_first, finalize=weakref.finalize)
    monkeypatch.setattr(calls, "weakref", collecting)
    relay = Relay(Owner, "work")
    original = Owner.work
    for _ in range(3):
        listener = Listener()
        stop = relay.subscribe(before=listener.see, after=listener.see)
        assert Owner().work() == "done"
        assert listener.count == 2
        del listener, stop
    gc.collect()
    assert Owner.work is original
