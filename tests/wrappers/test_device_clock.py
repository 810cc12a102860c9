"""What a training on an accelerator loses to the monitor, on a device that is played."""

import pytest

from rankscope.wrappers.guard import DeviceClock, Guard


class Device:
    """A host and a device that works off, in order, what the host has queued; in milliseconds."""

    def __init__(self):
        self.now = self.done = 0.0

    def work_on_host(self, milliseconds):
        self.now += milliseconds

    def launch(self, milliseconds):
        self.done = max(self.now, self.done) + milliseconds

    def event(self):
        return Event(self)

    def wait(self):
        self.now = max(self.now, self.done)


class Event:
    def __init__(self, device):
        self.device, self.time = device, None

    def record(self):
        self.time = max(self.device.now, self.device.done)

    def query(self):
        return self.time <= self.device.now

    def elapsed_time(self, end):
        assert self.query()
        assert end.query(), "the device has not come so far"
        return end.time - self.time


def train(steps, *, host, kernels, own_host, own_kernels, spoilt=()):
    """Train with one hook a step, which hands over the step before; return what each has lost."""
    device, step = Device(), 0
    clock = DeviceClock(device.event, Event.record, lambda: False)
    guard = Guard(pytest.fail, clock)
    taken, lost = [], []

    def hook():
        taken.append(guard.take_device_overhead(step, 99.0, observed=step % 2 == 0))
        if step in spoilt:
            guard.leave_out(0.5)
        device.work_on_host(own_host)
        device.launch(own_kernels * (step % 2 + 1))

    for step in range(steps):  # noqa: B007
        device.work_on_host(host)
        device.launch(kernels)
        guard(hook)
    device.wait()
    for felt in taken:
        assert felt.ready
        lost.append(felt.read())
    return lost


def test_work_is_hidden_while_the_device_has_work_left():
    lost = train(40, host=1, kernels=20, own_host=5, own_kernels=2)
    # The work in step 6 counts to step 7, which is not observed; that in 13 to 14, which is.
    assert lost[:7] == [99.0] * 7
    assert lost[7] == pytest.approx(0.002)
    assert lost[9] == pytest.approx(0.002)  # one of its kind
    assert lost[8] == 99.0  # nothing is known of its kind yet
    assert lost[14] == lost[16] == pytest.approx(0.004)


def test_a_step_that_does_more_is_left_out():
    lost = train(40, host=1, kernels=20, own_host=5, own_kernels=2, spoilt=(6,))
    assert lost[7] == 99.0
    assert lost[21] == pytest.approx(0.002)
