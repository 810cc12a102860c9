"""Objects are found while other threads go on."""

import sys
import threading

from torch import nn

from rankscope.wrappers.living import live_objects, one_walk


class Marked:
    pass


class More(Marked):
    pass


class Other(More):
    pass


def test_objects_are_found_by_class_and_by_the_first_class_that_is_asked_for():
    marked, more, other = Marked(), More(), Other()
    assert set(map(id, live_objects(Marked)[Marked])) == {id(marked), id(more), id(other)}
    found = live_objects(Other, Marked)
    assert found[Other] == [other]
    assert set(map(id, found[Marked])) == {id(marked), id(more)}


def test_one_walk_serves_all_that_ask_for_what_trainings_have():
    module = nn.Identity()
    with one_walk(), one_walk():
        found = live_objects(nn.Module)[nn.Module]
        assert any(one is module for one in found)
        marked = Marked()
        assert live_objects(nn.Module)[nn.Module] is found
        assert live_objects(Marked)[Marked] == [marked]
    assert live_objects(nn.Module)[nn.Module] is not found


def test_tuples_that_another_thread_builds_are_left_alone():
    marked, stop, errors, built = Marked(), threading.Event(), [], []

    def build():
        while not stop.is_set():
            try:
                built.append(len(tuple(number for number in range(2000))))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(5):
            assert live_objects(Marked)[Marked] == [marked]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert built
